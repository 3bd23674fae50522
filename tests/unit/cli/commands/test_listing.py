"""A line of `fitserve ps`."""

from __future__ import annotations

from typing import Any

from gateway.cli.commands.listing import _model_row, _stay_text

NOW = 10_000.0


def replica(**fields: Any) -> dict[str, Any]:
    replica_fields = {
        "engine": "vllm==1",
        "max_model_len": 8192,
        "gpus": ["GPU-a"],
        "memory_bytes": 21 << 30,
        "ready_at": NOW - 65,
    }
    return {"state": "ready", "follows": None, "busy_with": None, **replica_fields, **fields}


def view(*replicas: dict[str, Any], **fields: Any) -> dict[str, Any]:
    policy = {"pinned": False, "priority": 0}
    wish = {"source": "x/y", "endpoints": [], "policy": policy}
    view_fields = {
        "name": "m",
        "state": "ready",
        "detail": "",
        "used_at": NOW - 3,
        "created_at": 1.0,
        "keep_alive": -1,
        "change": None,
        "rival": None,
    }
    return {**view_fields, "wish": wish, "replicas": list(replicas), **fields}


def test_serving_replicas_are_counted_instead_of_wished_ones() -> None:
    idle = replica(
        state="no_plan", engine=None, gpus=[], max_model_len=None, memory_bytes=None, ready_at=None
    )
    numbers = {"GPU-a": 0, "GPU-b": 1}
    row = _model_row(view(replica(), replica(gpus=["GPU-b"]), idle), numbers, NOW)
    assert row == (
        "m",
        "ready 2/3",
        "vllm==1",
        "8,192",
        "0,1",
        "21.0 GiB",
        "1m5s",
        "3s ago",
        "for ever",
        "",
    )
    assert _model_row(view(replica()), numbers, NOW)[1] == "ready"


def test_a_starting_engine_shows_its_phase_with_elapsed_and_expected_time() -> None:
    start_time = {"phases": {"load": 12.0}, "low_s": 30.0, "high_s": 40.0, "grade": "measured"}
    load: dict[str, Any] = {
        "phase": "load",
        "elapsed_s": 1.0,
        "total_s": 9.0,
        "conditions": {"origin": "process", "is_cache_empty": False},
        "expected": start_time,
    }

    def detail(**changes: Any) -> str:
        starting = replica(state="starting", busy_with="loading weights", start=load | changes)
        row = _model_row(view(starting, state="starting", detail="loading weights"), {}, NOW)
        return str(row[-1])

    assert detail() == "loading weights 1s of 12s, 9s of 30s to 40s in all"
    guess = {**start_time, "low_s": 40.0, "grade": "estimate"}
    assert (
        detail(phase="kv", expected=guess)
        == "loading weights; making the KV cache 1s, 9s of 40s in all, an estimate"
    )
    assert detail(phase=None) == "loading weights; the start takes 30s to 40s in all"
    cold = {"origin": "container", "is_cache_empty": True}
    assert detail(expected=None, conditions=cold) == (
        "loading weights 1s, a first start, so its time is unknown"
    )
    assert detail(phase=None, expected=None) == "loading weights"


def test_an_unknown_value_is_a_dash() -> None:
    idle = replica(
        state="starting", engine=None, gpus=[], max_model_len=None, memory_bytes=None, ready_at=None
    )
    row = _model_row(view(idle, state="starting", detail="planning", used_at=None), {}, NOW)
    assert row == ("m", "starting", "-", "-", "-", "-", "-", "-", "for ever", "planning")
    endpoint = _model_row(view(detail="1 of 1 endpoints answer", keep_alive=None), {}, NOW)
    assert endpoint == (
        "m",
        "ready",
        "-",
        "-",
        "-",
        "-",
        "-",
        "3s ago",
        "-",
        "1 of 1 endpoints answer",
    )


def test_a_gpu_that_is_lost_has_no_number() -> None:
    assert _model_row(view(replica(gpus=["GPU-a", "GPU-x"])), {"GPU-a": 0}, NOW)[4] == "0,?"


def test_the_stay_of_a_loaded_model_counts_down() -> None:
    policy = {"pinned": False}
    view = {"wish": {"policy": policy}, "keep_alive": 300.0, "used_at": None, "created_at": 0.0}
    view |= {"state": "ready"}
    assert _stay_text(view, 1000.0, 1000.0) == "5m"
    assert _stay_text(view | {"used_at": 1100.0}, 1000.0, 1220.0) == "3m"
    assert _stay_text(view, 1000.0, 9000.0) == "0s"
    # A model that is out stays for its keep_alive once it is loaded.
    assert _stay_text(view | {"state": "stopped"}, None, 9000.0) == "5m"
    assert _stay_text(view | {"keep_alive": -1.0}, 1000.0, 9000.0) == "for ever"
    assert _stay_text(view | {"wish": {"policy": {"pinned": True}}}, 1.0, 2.0) == "pinned"
