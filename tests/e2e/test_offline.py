"""A model stays at the commit at which it was added, and starts from the disk without a question:
wherever `main` has moved, and where there is no network."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.demo.checkpoint import make_model
from tests.e2e.conftest import START_S, Gateway
from tests.e2e.scripted import engines, scripted_gateway
from tests.support.adapters import adapter_files
from tests.support.fake_hub import COMMIT, FakeHub, FakeRepo
from tests.support.paths import ROOT

MOVED = "f" * 40
# A network of its own, with nothing but loopback in it.
ALONE = ("unshare", "--map-root-user", "--net")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    make_model(tmp_path / "demo")
    files = {path.name: path.read_bytes() for path in (tmp_path / "demo").iterdir()}
    with FakeHub({"org/name": FakeRepo(files)}) as new_hub:
        yield new_hub


@pytest.fixture
def gateway(tmp_path: Path, hub: FakeHub) -> Iterator[Gateway]:
    settings = {
        "FITSERVE_HF_ENDPOINT": hub.url(),
        "NO_PROXY": "127.0.0.1",
        "HF_HOME": str(tmp_path / "hf"),
    }
    with contextlib.closing(scripted_gateway(tmp_path, **settings)) as new_gateway:
        new_gateway.start()
        yield new_gateway


def dies(gateway: Gateway) -> None:
    """The gateway, and with it the machine: no engine goes on."""
    gateway.kill()
    for pid in (pid for pids in engines(gateway).values() for pid in pids):
        os.kill(pid, signal.SIGKILL)


def test_a_model_stays_at_its_commit_and_starts_without_a_question(
    gateway: Gateway, hub: FakeHub
) -> None:
    result = gateway.cli("add", "m", "org/name", "--wait", "--json")
    assert result.returncode == 0, result.stderr + gateway.log.read_text()[-3000:]
    view = json.loads(result.stdout)
    assert view["wish"]["commits"] == {"org/name": COMMIT}
    assert view["plan"]["model"]["revision"] == COMMIT
    assert f"org/name is pinned to commit {COMMIT}" in gateway.cli("show", "m").stdout
    (row,) = json.loads(gateway.cli("ps", "--json").stdout)["data"]
    assert row["wish"]["commits"] == {"org/name": COMMIT}

    hub.repos["org/name"].commit = MOVED
    hub.requests.clear()
    dies(gateway)
    gateway.start()
    view = gateway.until("m", "ready")
    assert view["plan"]["model"]["revision"] == COMMIT
    assert hub.requests == []
    assert (
        gateway.data.parent / "hf/hub/models--org--name/snapshots" / COMMIT / "config.json"
    ).is_file()

    # Another name has the branch as it is now.
    response = gateway.client.post(
        "/admin/models?dry_run=true", json={"name": "other", "source": "org/name"}
    )
    assert response.json()["plans"][0]["model"]["revision"] == MOVED


def test_an_adapter_stays_at_its_commit_and_is_there_again_without_a_question(
    gateway: Gateway, hub: FakeHub, tmp_path: Path
) -> None:
    hub.repos["org/sql"] = FakeRepo(adapter_files(tmp_path / "demo"), commit="a" * 40)
    result = gateway.cli("add", "m", "org/name", "--lora", "sql=org/sql", "--wait", "--json")
    assert result.returncode == 0, result.stderr + gateway.log.read_text()[-3000:]
    view = json.loads(result.stdout)
    assert view["wish"]["commits"] == {"org/name": COMMIT, "org/sql": "a" * 40}
    assert view["plan"]["adapters"] == [{"name": "sql", "source": "org/sql", "revision": "a" * 40}]
    models = {model["id"]: model for model in gateway.client.get("/v1/models").json()["data"]}
    assert (models["sql"]["parent"], models["sql"]["root"]) == ("m", "org/sql")
    body = {"model": "sql", "prompt": "Hi", "max_tokens": 1}
    assert gateway.client.post("/v1/completions", json=body).status_code == 200

    hub.repos["org/sql"].commit = MOVED
    hub.requests.clear()
    dies(gateway)
    gateway.start()
    assert gateway.until("m", "ready")["plan"]["adapters"][0]["revision"] == "a" * 40
    assert hub.requests == []
    assert gateway.client.post("/v1/completions", json=body).status_code == 200


def test_disk_use_is_listed_and_weights_go_with_their_last_model(
    gateway: Gateway, hub: FakeHub
) -> None:
    cache = gateway.data.parent / "hf" / "hub"
    for name in ("m", "other"):
        assert gateway.cli("add", name, "org/name", "--wait").returncode == 0
    document = json.loads(gateway.cli("df", "--json").stdout)
    (revision,) = document["revisions"]
    assert (document["cache"], revision["repo"], revision["commit"], revision["models"]) == (
        str(cache),
        "org/name",
        COMMIT,
        ["m", "other"],
    )
    assert revision["bytes"] == sum(map(len, set(hub.repos["org/name"].files.values())))
    assert revision["is_from_fitserve"]
    assert document["unused_bytes"] == 0
    (engine,) = document["engines"]
    assert (engine["name"], engine["models"]) == ("vllm-cpu-99.0.0", ["m", "other"])
    result = gateway.cli("df")
    assert "m, other" in result.stdout, result.stderr

    first = gateway.cli("rm", "m", "--weights")
    assert first.stdout.strip() == "m: removed, 0 bytes freed; org/name stays: other needs it", (
        first.stderr
    )
    gateway.until("other", "ready")
    assert (cache / "models--org--name").is_dir()
    last = json.loads(gateway.cli("rm", "other", "--weights", "--json").stdout)
    assert (last["freed_bytes"], last["removed"], last["kept"]) == (
        revision["bytes"],
        [["org/name", COMMIT]],
        [],
    )
    assert not (cache / "models--org--name").exists()
    assert json.loads(gateway.cli("df", "--json").stdout)["revisions"] == []
    # Removed files are brought again.
    assert gateway.cli("add", "m", "org/name", "--wait").returncode == 0


def ask_alone(gateway: Gateway) -> Any:
    """The gateway is started in a network of its own, and asked there; both are gone afterwards."""
    command = [
        *ALONE,
        sys.executable,
        "-m",
        "tests.support.alone",
        str(gateway.port),
        *gateway.command,
    ]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=gateway.environment,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.mark.skipif(
    subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode != 0,
    reason="no network namespaces here",
)
def test_everything_on_the_disk_starts_without_the_network(gateway: Gateway) -> None:
    assert gateway.cli("add", "m", "org/name", "--wait").returncode == 0
    dies(gateway)
    gateway.environment["FITSERVE_HF_ENDPOINT"] = "https://huggingface.co"
    report = ask_alone(gateway)
    assert report["view"]["state"] == "ready", report
    assert report["view"]["plan"]["model"]["revision"] == COMMIT
    assert report["answer"]["choices"]
    assert report["add"]["error"]["message"].startswith(
        "The Hugging Face Hub at https://huggingface.co cannot be reached"
    )
    gateway.environment["FITSERVE_HF_ENDPOINT"] = ""
    gateway.start()
