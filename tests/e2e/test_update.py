"""A model goes to the present commit of its repository, or to another engine version, while it
serves; and back where the new one fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli.demo.checkpoint import make_model
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway, workers
from tests.support.fake_hub import COMMIT, FakeHub, FakeRepo
from tests.support.patience import HANG_S
from tests.support.steady_client import keep_asking
from tests.support.yaml_file import read_yaml

MOVED, BROKEN = "f" * 40, "b" * 40
NEW, BAD = "99.1.0", "99.2.0"
FAILS = ["--exit-code", "3", "--no-serve"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    make_model(tmp_path / "demo")
    files = {path.name: path.read_bytes() for path in (tmp_path / "demo").iterdir()}
    with FakeHub({"org/name": FakeRepo(files, older=(COMMIT, MOVED))}) as new_hub:
        yield new_hub


@contextlib.contextmanager
def serving(folder: Path, hub: FakeHub, *scripts: list[str], **settings: str) -> Iterator[Gateway]:
    """A gateway with the model `m` of the Hub. scripts: of its engine's starts."""
    gateway_settings = {
        "FITSERVE_HF_ENDPOINT": hub.url(),
        "NO_PROXY": "127.0.0.1",
        "HF_HOME": str(folder / "hf"),
        **settings,
    }
    with contextlib.closing(scripted_gateway(folder, *scripts, **gateway_settings)) as gateway:
        for version, flags in ((NEW, []), (BAD, FAILS)):
            _another(gateway, version, flags)
        gateway.start()
        result = gateway.cli("add", "m", "org/name", "--engine", ENGINE, "--wait")
        assert result.returncode == 0, result.stderr + gateway.log.read_text()[-3000:]
        yield gateway


def _another(gateway: Gateway, version: str, flags: list[str]) -> None:
    """The scripted engine in another version, which plays these flags."""
    kind, _, old = ENGINE.partition("==")
    folder = gateway.data.parent / "profiles" / "engines" / kind
    profile = read_yaml(folder / f"{old}.yaml")
    profile |= {
        "version": version,
        "image": f"engine:{version}",
        "process_command": [*profile["process_command"], *flags],
    }
    (folder / f"{version}.yaml").write_text(yaml.safe_dump(profile))
    environment = gateway.data / "engines" / f"{kind}-{version}"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to("/bin/false")
    (environment / ".complete").touch()


def answers(gateway: Gateway) -> bool:
    return (
        gateway.client.post(
            "/v1/completions", json={"model": "m", "prompt": "Hi", "max_tokens": 1}
        ).status_code
        == 200
    )


def now(gateway: Gateway) -> tuple[Any, Any]:
    """The commit and the engine that serve."""
    view = gateway.until("m", "ready")
    return view["plan"]["model"]["revision"], view["plan"]["engine"]["version"]


@pytest.mark.anyio
async def test_an_update_of_the_commit_breaks_no_answer_of_any_worker(
    tmp_path: Path, hub: FakeHub
) -> None:
    with serving(tmp_path, hub, ["--tokens-per-second", "50"], FITSERVE_WORKERS="2") as gateway:
        await asyncio.to_thread(wait_for, "two workers", lambda: len(workers(gateway)) == 2)
        async with keep_asking(gateway) as counts:
            await asyncio.to_thread(
                wait_for, "answers of the first commit", lambda: len(counts) == 2
            )
            engine_before = next(iter(engines(gateway)))
            hub.repos["org/name"].commit = MOVED
            result = await asyncio.to_thread(gateway.cli, "update", "m", "--yes", "--wait")
            assert result.returncode == 0, result.stderr + gateway.log.read_text()[-3000:]
            await asyncio.to_thread(
                wait_for,
                "the old engine's end",
                lambda: engine_before not in engines(gateway),
                4 * HANG_S,
            )
            counter = Counter(counts)
            await asyncio.to_thread(
                wait_for, "answers of the new commit", lambda: len(counts - counter) == 2
            )
        assert now(gateway)[0] == MOVED
        assert [attempt["failure"] for attempt in gateway.show("m")["attempts"]] == [None, None]


def test_a_moved_commit_is_shown_first_and_taken_when_it_is_wanted(
    tmp_path: Path, hub: FakeHub
) -> None:
    with serving(tmp_path, hub) as gateway:
        assert "up to date" in gateway.cli("update", "m").stdout
        hub.repos["org/name"].commit = MOVED
        result = gateway.cli("update", "m", "--dry-run")
        assert result.returncode == 0, result.stderr
        assert COMMIT in result.stdout
        assert MOVED in result.stdout
        # An answer other than yes changes nothing.
        assert gateway.cli("update", "m").returncode != 0
        assert now(gateway)[0] == COMMIT
        completed = gateway.cli("update", "m", "--yes", "--wait")
        assert completed.returncode == 0, completed.stderr + gateway.log.read_text()[-3000:]
        assert now(gateway)[0] == MOVED
        assert gateway.show("m")["wish"]["commits"] == {"org/name": MOVED}
        assert answers(gateway)
        assert "up to date" in gateway.cli("update", "m").stdout


def test_a_commit_that_does_not_start_leaves_the_old_one_in_force(
    tmp_path: Path, hub: FakeHub
) -> None:
    with serving(tmp_path, hub, [], FAILS) as gateway:
        first = gateway.show("m")["attempts"][0]["instance"]
        hub.repos["org/name"].commit = BROKEN
        result = gateway.cli("update", "m", "--yes", "--wait")
        assert result.returncode == 1, result.stdout
        assert "the change of m failed" in result.stderr
        view = gateway.until("m", "ready")
        assert view["wish"]["commits"] == {"org/name": COMMIT}
        assert (view["change"]["state"], view["plan"]["model"]["revision"]) == ("refused", COMMIT)
        # The engine that served all the time, not one that was started again.
        assert [
            attempt["instance"] for attempt in view["attempts"] if attempt["state"] == "ready"
        ] == [first]
        assert answers(gateway)


def test_another_engine_version_takes_over_unless_it_fails(tmp_path: Path, hub: FakeHub) -> None:
    with serving(tmp_path, hub) as gateway:
        kind = ENGINE.partition("==")[0]
        hub.repos["org/name"].commit = MOVED
        result = gateway.cli("update", "m", "--engine", f"{kind}=={NEW}", "--dry-run")
        assert f"{kind}=={NEW}" in result.stdout, result.stderr
        # Nobody said yes.
        assert gateway.cli("update", "m", "--engine", f"{kind}=={NEW}").returncode != 0
        assert now(gateway) == (COMMIT, "99.0.0")
        completed = gateway.cli(
            "update", "m", "--engine", f"{kind}=={NEW}", "--yes", "--wait", "--json"
        )
        assert completed.returncode == 0, completed.stderr + gateway.log.read_text()[-3000:]
        assert json.loads(completed.stdout)["wish"]["engines"] == [f"{kind}=={NEW}"]
        # The weights stay, wherever the branch has moved.
        assert now(gateway) == (COMMIT, NEW)
        outcome = gateway.cli("update", "m", "--engine", f"{kind}=={BAD}", "--yes", "--wait")
        assert outcome.returncode == 1, outcome.stdout
        assert "the change of m failed" in outcome.stderr
        assert now(gateway) == (COMMIT, NEW)
        assert gateway.show("m")["wish"]["engines"] == [f"{kind}=={NEW}"]
        assert answers(gateway)
