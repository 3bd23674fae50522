"""Models that leave their GPU by sleeping, and wake when they are asked: the whole gateway, with
engines that take memory of a pretended GPU as vLLM does."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.controller.failpoint import FAILPOINTS
from tests.e2e.conftest import wait_for
from tests.e2e.demand_storm import DemandStorm
from tests.e2e.scripted import engines
from tests.support.patience import hang_s

MEDIUM = {"replicas": 1, "max_context": 8192}


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[DemandStorm]:
    """Of its models two fit into the GPU."""
    storm = DemandStorm(tmp_path, random.Random(3))
    try:
        yield storm
    finally:
        storm.end()


def ask(storm: DemandStorm, name: str) -> None:
    answer = storm.gateway.client.post(
        "/v1/completions", json={"model": name, "prompt": "hi", "max_tokens": 3}, timeout=hang_s()
    )
    assert answer.status_code == 200, answer.text


def state(storm: DemandStorm, name: str) -> str:
    return str(storm.gateway.show(name)["state"])


def until(storm: DemandStorm, expected_state: str) -> None:
    wait_for(f"m0 is {expected_state}", lambda: state(storm, "m0") == expected_state)


def at_rest(storm: DemandStorm, names: list[str]) -> None:
    """Wait until no model of these starts or leaves."""
    wait_for(
        f"{names} are at rest",
        lambda: {state(storm, name) for name in names} <= {"ready", "stopped", "asleep"},
    )


def attempts(storm: DemandStorm, name: str) -> list[dict[str, Any]]:
    attempt_list: list[dict[str, Any]] = storm.gateway.show(name)["attempts"]
    return attempt_list


def facts(storm: DemandStorm) -> list[str]:
    return [
        row["fact"]["kind"]
        for row in storm.gateway.client.get("/admin/facts").json()["data"]
        if row["id"] is not None
    ]


def one_that_sleeps(storm: DemandStorm) -> dict[str, Any]:
    """m0, which nobody has asked for a moment: its only attempt."""
    storm.gateway.start()
    storm.add("m0", **MEDIUM, policy={"keep_alive": 1})
    until(storm, "asleep")
    (attempt,) = attempts(storm, "m0")
    return attempt


def test_one_copy_sleeps_for_another_model_and_wakes_when_there_is_room(
    tmp_path: Path,
) -> None:
    storm = DemandStorm(tmp_path, random.Random(3), gpus=2)
    small = {**MEDIUM, "gpus": 1, "policy": {"keep_alive": "10m"}}

    def copies(*expected_states: str) -> None:
        wait_for(
            f"m0 is {expected_states}",
            lambda: (
                sorted(replica["state"] for replica in storm.gateway.show("m0")["replicas"])
                == [*expected_states]
            ),
        )

    def write_plan(name: str) -> None:
        wait_for(f"{name} is planned", lambda: state(storm, name) in ("ready", "stopped"))

    try:
        storm.gateway.start()
        storm.add("m0", **{**small, "replicas": 2})
        copies("ready", "ready")
        for name in ("m1", "m2", "m3"):
            storm.add(name, **small)
            write_plan(name)
            ask(storm, name)
        # Two fit into each GPU: for the fifth engine one copy sleeps, though m1 was asked longer
        # ago than m0.
        ask(storm, "m0")
        copies("asleep", "ready")
        view = storm.gateway.show("m0")
        assert (view["state"], view["detail"][:20]) == ("ready", "1 of 2 copies serve;")
        before = [attempt["id"] for attempt in view["attempts"]]
        assert {state(storm, name) for name in ("m1", "m2", "m3")} == {"ready"}
        assert storm.gateway.client.post("/admin/models/m3/stop").status_code == 202
        copies("ready", "ready")
        assert [(attempt["id"], attempt["failure"]) for attempt in attempts(storm, "m0")] == [
            (number, None) for number in before
        ], "the same ones"
    finally:
        storm.end()


def test_an_evicted_model_sleeps_and_wakes_as_the_same_engine(
    storm: DemandStorm,
) -> None:
    storm.gateway.start()
    names = storm.names[:3]
    for count, name in enumerate(names, 1):
        storm.add(name, **MEDIUM, policy={"keep_alive": "10m"})
        # Each is planned beside the ones before, whatever the speed of the machine.
        at_rest(storm, names[:count])
    for name in names:
        ask(storm, name)
    assert sorted(state(storm, name) for name in names) == ["asleep", "ready", "ready"]
    (sleeper,) = (name for name in names if state(storm, name) == "asleep")
    attempt_before = attempts(storm, sleeper)[-1]
    memory = storm.gateway.show(sleeper)["plan"]["memory"]
    assert min(attempt_before["asleep"]["gave"].values()) > 0.9 * (
        memory["weights_bytes"] + memory["kv_bytes"]
    ), attempt_before["asleep"]
    states = {
        model["id"]: model["state"]
        for model in storm.gateway.client.get("/v1/models").json()["data"]
    }
    assert states[sleeper] == "asleep"
    assert 'fitserve_models{state="asleep"} 1' in storm.gateway.client.get("/metrics").text
    assert facts(storm).count("sleep_works") == 1
    ask(storm, sleeper)
    attempt = attempts(storm, sleeper)[-1]
    assert (attempt["id"], attempt["asleep"]) == (attempt_before["id"], None), (
        "it woke up, and was not started"
    )
    assert state(storm, sleeper) == "ready"


def test_an_idle_model_sleeps_and_its_engine_needs_the_key(
    storm: DemandStorm,
) -> None:
    first_sleeper = one_that_sleeps(storm)
    record = json.loads(
        (storm.gateway.data / "instances" / f"{first_sleeper['instance']}.json").read_text()
    )
    with httpx.Client(
        base_url=f"http://127.0.0.1:{record['port']}", trust_env=False, timeout=hang_s()
    ) as client:
        for method, path in (
            ("GET", "/health"),
            ("GET", "/is_sleeping"),
            ("POST", "/wake_up"),
            ("POST", "/v1/completions"),
        ):
            assert client.request(method, path).status_code == 401, path
        key = {"authorization": f"Bearer {record['key']}"}
        assert client.get("/is_sleeping", headers=key).json() == {"is_sleeping": True}
    ask(storm, "m0")
    until(storm, "asleep")
    ask(storm, "m0")
    assert [attempt["id"] for attempt in attempts(storm, "m0")] == [first_sleeper["id"]]
    # Its owner's stop is more than sleep.
    until(storm, "asleep")
    storm.gateway.client.post("/admin/models/m0/stop").raise_for_status()
    until(storm, "stopped")
    wait_for("its engine is gone", lambda: not engines(storm.gateway))


def test_an_engine_that_dies_asleep_has_not_failed(storm: DemandStorm) -> None:
    first_sleeper = one_that_sleeps(storm)
    for pid in engines(storm.gateway)[first_sleeper["instance"]]:
        os.kill(pid, signal.SIGKILL)
    until(storm, "stopped")
    ask(storm, "m0")
    old, new = attempts(storm, "m0")
    assert (old["state"], old["failure"]) == ("stopped", None)
    assert new["id"] != first_sleeper["id"]


def test_an_engine_that_keeps_its_memory_ends_sleep_on_this_machine(
    storm: DemandStorm,
) -> None:
    (storm.gpus / "keeps").touch()
    storm.gateway.start()
    storm.add("m0", **MEDIUM, policy={"keep_alive": 1})
    until(storm, "stopped")
    assert facts(storm).count("sleep_fails") == 1
    ask(storm, "m0")
    choice = storm.gateway.show("m0")["plan"]["sleep_mode"]
    assert not choice["value"]
    assert "of each GPU when it fell asleep" in choice["reason"]
    until(storm, "stopped")
    assert [attempt["state"] for attempt in attempts(storm, "m0")] == ["stopped", "stopped"]


@pytest.mark.parametrize(
    "point", [point for point in FAILPOINTS if point.startswith(("Sleep", "Wake"))]
)
def test_a_gateway_that_dies_during_sleep_keeps_the_running_engine(
    storm: DemandStorm, point: str
) -> None:
    storm.gateway.environment["FITSERVE_FAILPOINT"] = point
    storm.gateway.start()
    storm.add("m0", **MEDIUM, policy={"keep_alive": 1})
    if point.startswith("Wake"):
        until(storm, "asleep")
        with contextlib.suppress(httpx.HTTPError):
            ask(storm, "m0")
    assert storm.gateway.process is not None
    assert storm.gateway.process.wait(hang_s()) == -signal.SIGKILL
    running = engines(storm.gateway)
    assert len(running) == 1
    del storm.gateway.environment["FITSERVE_FAILPOINT"]
    storm.gateway.start()
    wait_for("m0 is known", lambda: "m0" in storm.gateway.client.get("/v1/models").text)
    ask(storm, "m0")
    until(storm, "asleep")
    ask(storm, "m0")
    assert engines(storm.gateway) == running
    assert len(attempts(storm, "m0")) == 1
