"""The lines of a wait for a model."""

from __future__ import annotations

from typing import Any

from gateway.cli.commands.model import WaitReports

EXPECTED = {"phases": {"load": 12.0}, "low_s": 30.0, "high_s": 40.0, "grade": "measured"}
WARM = {"origin": "process", "is_cache_empty": False}


def view(detail: str, phase: str | None = None, **start: Any) -> dict[str, Any]:
    fields = {
        "phase": phase,
        "elapsed_s": 0.0,
        "total_s": 0.0,
        "conditions": WARM,
        "expected": None,
    }
    replicas = [{"start": fields | start}] if phase or start else [{"start": None}]
    return {"state": "starting", "detail": detail, "replicas": replicas}


def test_a_new_phase_gives_a_line_with_its_times_and_no_line_comes_twice_in_a_row() -> None:
    reports, now_s, lines = WaitReports("m"), 0.0, []
    views = [
        view("planning"),
        view("planning"),
        view("pulling", expected=EXPECTED),
        view("loading", "load", elapsed_s=1.0, total_s=9.0, expected=EXPECTED),
        view("loading", "load", elapsed_s=2.0, total_s=10.0, expected=EXPECTED),
        view("loading", "kv", elapsed_s=0.2, total_s=14.0, expected=EXPECTED),
    ]
    for next_view in views:
        now_s += 0.5
        lines.append(reports.line(next_view, now_s))
    assert lines == [
        "m: starting (planning)",
        "",
        "m: starting (pulling); the start takes 30s to 40s in all",
        "m: starting (loading); loading weights 1s of 12s, 9s of 30s to 40s in all",
        "",
        "m: starting (loading); making the KV cache 0s, 14s of 30s to 40s in all",
    ]


def test_a_long_phase_is_reported_at_intervals_if_it_changed() -> None:
    reports = WaitReports("m")
    assert reports.line(view("loading", "load", elapsed_s=1.0), 0.0)
    assert not reports.line(view("loading", "load", elapsed_s=9.0), 8.0)
    later = view("loading", "load", elapsed_s=21.0)
    assert reports.line(later, 20.0) == "m: starting (loading); loading weights 21s"
    assert not reports.line(later, 60.0)


def test_only_the_first_line_of_a_start_says_that_its_time_is_unknown() -> None:
    reports = WaitReports("m")
    empty: dict[str, Any] = {"conditions": WARM | {"is_cache_empty": True}}
    lines = [
        reports.line(view("", elapsed_s=0.0, **empty), 0.0),
        reports.line(view("", "load", elapsed_s=1.0, **empty), 1.0),
        reports.line(view("", "kv", elapsed_s=2.0, **empty), 2.0),
    ]
    assert lines == [
        "m: starting; a first start, so its time is unknown",
        "m: starting; loading weights 1s",
        "m: starting; making the KV cache 2s",
    ]


def test_a_state_that_begins_its_phase_is_written_once() -> None:
    verified_view = view("", "prove", elapsed_s=3.0) | {"state": "verifying"}
    assert WaitReports("m").line(verified_view, 0.0) == "m: verifying answers 3s"
