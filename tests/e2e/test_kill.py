"""The gateway dies at every point where it does something, and anywhere in between: a restart finds
or mends everything."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.controller.failpoint import CHANGE_FAILPOINTS, FAILPOINTS
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, GPU_ENGINE, engines, gpu_gateway, scripted_gateway, starts
from tests.e2e.storm import Storm, Victim
from tests.support.makers import machine
from tests.support.patience import hang_s
from tests.support.running import model_folder

TOO_LONG = (
    "ValueError: To serve at least one request with the model's max seq len (4096), (4.00 GiB KV"
    " cache is needed, which is larger than the available KV cache memory (1.0 GiB). Based on the"
    " available memory, the estimated maximum model length is 1024."
)


def add(gateway: Gateway, folder: Path) -> None:
    """The model m."""
    body = {"name": "m", "source": str(model_folder(folder / "model")), "engines": [ENGINE]}
    response = gateway.client.post("/admin/models", json=body)
    assert response.status_code == 202, response.text


# They have tests of their own: Sleep and Wake in test_sleep.py, the others below.
LATER = ("EndAttemptAction", "SleepAction", "WakeAction", "NoteAbilities")


@pytest.mark.parametrize("point", [point for point in FAILPOINTS if not point.startswith(LATER)])
def test_a_death_at_an_effect_costs_one_restart(tmp_path: Path, point: str) -> None:
    # The first engine fails, so that every effect happens: plan, launch, fail, stop, plan, launch,
    # verify, publish.
    with contextlib.closing(
        scripted_gateway(tmp_path, ["--print", TOO_LONG, "--no-serve"], [])
    ) as gateway:
        gateway.environment["FITSERVE_FAILPOINT"] = point
        gateway.start()
        # It may die before its answer is out; the order is on the disk by then.
        with contextlib.suppress(httpx.HTTPError):
            add(gateway, tmp_path)
        assert gateway.process is not None
        assert gateway.process.wait(hang_s()) == -signal.SIGKILL
        del gateway.environment["FITSERVE_FAILPOINT"]
        gateway.start()
        view = gateway.until("m", "ready")
        running = engines(gateway)
        assert list(running) == [view["attempts"][-1]["instance"]]
        assert len(next(iter(running.values()))) == 1
        # The engine that failed and the one that serves; no start for nothing.
        assert starts(gateway) == 2
        assert [attempt["state"] for attempt in view["attempts"]] == ["failed", "ready"]
    assert not engines(gateway)


@pytest.mark.parametrize(
    "point", [point for point in FAILPOINTS if point.startswith("EndAttemptAction")]
)
def test_a_death_while_a_model_is_stopped_leaves_it_stopped(tmp_path: Path, point: str) -> None:
    with contextlib.closing(scripted_gateway(tmp_path)) as gateway:
        gateway.environment["FITSERVE_FAILPOINT"] = point
        gateway.start()
        add(gateway, tmp_path)
        gateway.until("m", "ready")
        with contextlib.suppress(httpx.HTTPError):
            gateway.client.post("/admin/models/m/stop")
        assert gateway.process is not None
        assert gateway.process.wait(hang_s()) == -signal.SIGKILL
        assert len(engines(gateway)) == 1
        del gateway.environment["FITSERVE_FAILPOINT"]
        gateway.start()
        view = gateway.until("m", "stopped")
        assert [attempt["state"] for attempt in view["attempts"]] == ["stopped"]
        wait_for("its engine is gone", lambda: not engines(gateway))
        assert starts(gateway) == 1
        assert gateway.client.post("/admin/models/m/start").status_code == 202
        gateway.until("m", "ready")


@pytest.mark.parametrize(
    "point", [point for point in FAILPOINTS if point.startswith("NoteAbilities")]
)
def test_a_death_while_late_abilities_are_noted_costs_nothing(tmp_path: Path, point: str) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    script = ["--hold-chat", str(hold)]
    with contextlib.closing(scripted_gateway(tmp_path, script)) as gateway:
        gateway.environment["FITSERVE_FAILPOINT"] = point
        gateway.start()
        folder = model_folder(tmp_path / "model")
        template = json.dumps({"chat_template": "{{ messages }}"})
        (folder / "tokenizer_config.json").write_text(template)
        body = {"name": "m", "source": str(folder), "engines": [ENGINE]}
        response = gateway.client.post("/admin/models", json=body)
        assert response.status_code == 202, response.text
        # It serves before it has answered long questions.
        view = gateway.until("m", "ready")
        json_schema = view["abilities"]["json_schema"]
        assert json_schema["state"] == "unknown"
        hold.unlink()
        assert gateway.process is not None
        assert gateway.process.wait(hang_s()) == -signal.SIGKILL
        del gateway.environment["FITSERVE_FAILPOINT"]
        gateway.start()
        view = gateway.until("m", "ready")
        assert [attempt["state"] for attempt in view["attempts"]] == ["ready"]
        assert list(engines(gateway)) == [view["attempts"][0]["instance"]]
        assert starts(gateway) == 1
        # An answer that was on the disk counts; another one is not refuted.
        now = view["abilities"]["json_schema"]
        assert (now != json_schema) == point.endswith("after"), now


# The new engine starts next to the serving one, in its place where one GPU has no room for two, and
# back, for the new engine says nonsense.
_CHANGES = {
    "Adopt.before": (None, []),
    "Adopt.after": (None, []),
    "CompleteChange.before": (None, []),
    "ReplaceInPlace.after": ("3090", []),
    "StopRouting.after": ("3090", []),
    "RestartWithWish.after": ("3090", []),
    "AbandonChange.before": (None, ["--gibberish"]),
    "AbandonChange.after": (None, ["--gibberish"]),
}


@pytest.mark.parametrize("point", _CHANGES)
def test_a_death_in_a_change_costs_one_restart(tmp_path: Path, point: str) -> None:
    assert point in CHANGE_FAILPOINTS
    hardware, script = _CHANGES[point]
    new_gateway = (
        gpu_gateway(tmp_path, machine(hardware), [], script)
        if hardware
        else scripted_gateway(tmp_path, [], script)
    )
    with contextlib.closing(new_gateway) as gateway:
        gateway.environment["FITSERVE_FAILPOINT"] = point
        gateway.start()
        body = {
            "name": "m",
            "source": str(model_folder(tmp_path / "model")),
            "engines": [GPU_ENGINE if hardware else ENGINE],
        }
        assert (
            gateway.client.post(
                "/admin/models", json={**body, "max_context": 512, "replicas": 1}
            ).status_code
            == 202
        )
        gateway.until("m", "ready")
        with contextlib.suppress(httpx.HTTPError):
            response = gateway.client.patch("/admin/models/m", json={"max_context": 256})
            assert response.status_code == 202, response.text
        assert gateway.process is not None
        assert gateway.process.wait(hang_s()) == -signal.SIGKILL
        del gateway.environment["FITSERVE_FAILPOINT"]
        gateway.start()

        def change_is_over() -> bool:
            view = gateway.show("m")
            settled = view["change"] is None or view["change"]["state"] == "refused"
            live = [
                attempt["instance"] for attempt in view["attempts"] if attempt["state"] == "ready"
            ]
            return (
                settled
                and view["state"] == "ready"
                and len(live) == 1
                and list(engines(gateway)) == live
            )

        wait_for("one engine by the wish in force", change_is_over)
        view = gateway.show("m")
        assert view["wish"]["max_context"] == (512 if script else 256)
        assert (view["change"] is not None) == bool(script)
        answer = gateway.client.post(
            "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
        )
        assert answer.status_code == 200, answer.text
    assert not engines(gateway)


@pytest.mark.parametrize("victims", [("gateway",), ("gateway", "worker")])
def test_deaths_at_random_leave_neither_orphans_nor_twins(
    tmp_path: Path, victims: tuple[Victim, ...]
) -> None:
    """Under three writers at once; KILLS=200 in the environment: so many."""
    storm = Storm(tmp_path, random.Random(7), writer_count=3, victims=victims)
    try:
        storm.rounds(int(os.environ.get("KILLS", "12")))
        storm.settle()
        assert storm.target.ledger.count
    finally:
        storm.close()


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[Gateway]:
    """A gateway with the model m, ready."""
    with contextlib.closing(scripted_gateway(tmp_path)) as gateway:
        gateway.start()
        add(gateway, tmp_path)
        gateway.until("m", "ready")
        yield gateway


def test_an_engine_killed_under_a_gateway_that_is_away_is_started_again(ready: Gateway) -> None:
    ready.kill()
    for pids in engines(ready).values():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    wait_for("no engine", lambda: not engines(ready))
    ready.start()
    wait_for("another attempt", lambda: len(ready.show("m")["attempts"]) == 2)
    ready.until("m", "ready")


def test_a_gateway_that_was_killed_adopts_its_engine(ready: Gateway) -> None:
    """How soon, `python -m tests.e2e.storm` prints."""
    engines_before, attempts = engines(ready), ready.show("m")["attempts"]
    ready.kill()
    ready.start()
    ready.until("m", "ready")
    answer = ready.client.post(
        "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
    )
    assert answer.status_code == 200, answer.text
    assert engines(ready) == engines_before
    assert starts(ready) == 1
    assert ready.show("m")["attempts"] == attempts
