"""The band of starts on another machine: times of logs of real starts, for starts like them."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from gateway.diagnosis.log_reader import LogReader
from gateway.diagnosis.start_clock import StartClock
from gateway.diagnosis.starts_elsewhere import STARTS, start_elsewhere
from gateway.domain import StartConditions
from gateway.profiles.profiles import Profiles
from tests.support.makers import plan
from tests.support.paths import ROOT

LOGS = ROOT / "tests" / "logs"
NOW = re.compile(r"INFO (\d\d-\d\d \d\d:\d\d:\d\d)")
UNKNOWN = StartConditions()


@pytest.mark.parametrize("name", STARTS)
def test_the_seconds_of_a_start_are_read_from_its_log(name: str) -> None:
    reader, clock, now_s = LogReader(Profiles().signatures), None, 0.0
    for line in (LOGS / f"healthy-{name}.log").read_text(errors="replace").splitlines():
        if match := NOW.search(line):
            at = datetime.fromisoformat(f"2026-{match[1]}+00:00")
            now_s = at.timestamp()
            clock = clock or StartClock(now_s)
        if "Application startup complete" in line:
            break
        reader.feed(line.encode() + b"\n")
        if clock is not None:
            clock.enter(reader.progress.phase, now_s)
    assert clock is not None
    seconds = {phase: round(seconds) for phase, seconds in clock.seconds(now_s).items()}
    seconds.pop("load", None)  # of weights that were made up
    assert seconds == STARTS[name]


def test_only_a_similar_start_has_the_measured_band() -> None:
    new_plan = plan()
    expectation = start_elsewhere(new_plan, UNKNOWN)
    assert expectation is not None
    assert (expectation.low_s, expectation.high_s, expectation.starts, expectation.grade) == (
        56,
        141,
        4,
        "elsewhere",
    )
    assert expectation.phases["compile"] == 32.5
    assert "load" not in expectation.phases
    assert start_elsewhere(new_plan, StartConditions(origin="fork")) is None
    assert start_elsewhere(new_plan.evolve(gpus=("a", "b", "c", "d")), UNKNOWN) is None
    assert start_elsewhere(new_plan.evolve(gpus=()), UNKNOWN) is None
    sglang = new_plan.engine.evolve(kind="sglang")
    assert start_elsewhere(new_plan.evolve(engine=sglang), UNKNOWN) is None
