"""The output of the command line about a model."""

from __future__ import annotations

from gateway.cli.model_output import detail_text, expected_start_text, start_text, status_text


def test_a_start_that_has_not_begun_tells_its_time_or_that_nobody_knows_it() -> None:
    cold = {"origin": "process", "is_cache_empty": True}
    time = {"phases": {"import": 9.0}, "low_s": 60.0, "high_s": 150.0, "grade": "estimate"}
    assert expected_start_text({"conditions": cold, "time": time}) == (
        "The start takes 1m to 2m30s in all, an estimate, slower than later ones, as nothing is"
        " compiled yet."
    )
    assert expected_start_text({"conditions": cold, "time": time | {"grade": "elsewhere"}}) == (
        "The start takes 1m to 2m30s in all, measured on another machine, without reading weights,"
        " slower than later ones, as nothing is compiled yet."
    )
    assert expected_start_text({"conditions": cold, "time": None}) == (
        "No start like it was measured here, so its time is unknown."
    )
    warm = cold | {"is_cache_empty": False}
    assert expected_start_text({"conditions": warm, "time": None}) == (
        "No start like it was measured here, so its time is unknown."
    )


def test_a_phase_stands_once_beside_its_seconds() -> None:
    start = {
        "phase": "load",
        "elapsed_s": 3.0,
        "total_s": 9.0,
        "expected": None,
        "conditions": {"origin": "process", "is_cache_empty": False},
    }
    replica = {"start": start, "follows": None, "busy_with": None}
    view = {"state": "starting", "detail": "loading weights", "replicas": [replica]}
    assert status_text(view) == "starting"
    assert detail_text(view) == start_text(start) == "loading weights 3s"
    assert detail_text(view | {"detail": "starting"}) == "loading weights 3s"
    waiting = view | {"detail": "waits: b is unloaded"}
    begins = {"state": "starting", "detail": "starting the engine", "replicas": []}
    assert status_text(begins) == "starting (starting the engine)"
    out = {"state": "stopped", "detail": "stopped: no room", "replicas": []}
    assert status_text(out) == "stopped (no room)"
    assert status_text(waiting) == "starting (waits: b is unloaded)"
