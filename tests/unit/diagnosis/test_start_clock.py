"""The seconds of a start's phases, by the logs of engines that became ready."""

from __future__ import annotations

import re

import pytest

from gateway.diagnosis.log_reader import LogReader
from gateway.diagnosis.start_clock import StartClock
from gateway.profiles.profiles import Profiles
from tests.support.paths import LOGS

SIGNATURES = Profiles().signatures
READY = sorted(
    path.stem
    for path in LOGS.glob("healthy-*.log")
    if re.search(rb"startup complete|fired up", path.read_bytes())
)
# The end of an import, in the order of a start.
ORDER = ["import", "load", "profile", "compile", "kv", "graphs", "prove"]


def phase_seconds(name: str) -> dict[str, float]:
    """Seconds by phase, if each line took a second."""
    reader, clock, now_s = LogReader(SIGNATURES, "vllm"), StartClock(0.0), 0.0
    for line in (LOGS / f"{name}.log").read_bytes().split(b"\n"):
        reader.read(line)
        now_s += 1.0
        clock.enter(reader.progress.phase, now_s)
        if clock.phase == "prove":
            break
    seconds = clock.seconds(now_s)
    assert sum(seconds.values()) == pytest.approx(now_s)
    return seconds


@pytest.mark.parametrize("name", READY)
def test_every_healthy_log_tells_when_the_import_ends_and_the_proof_begins(name: str) -> None:
    phases = [*phase_seconds(name)]
    assert (phases[0], phases[-1]) == ("import", "prove")
    assert set(phases) <= set(ORDER)
    assert len(phases) >= 3


def test_the_logs_cover_both_engines_and_several_versions() -> None:
    for words in ("vllm-0.18.0", "vllm-0.26.0", "vllm-0.33.0", "sglang-0.5.10", "sglang-0.5.23"):
        assert any(words in name for name in READY), (words, READY)


def test_a_repeated_phase_counts_once() -> None:
    clock = StartClock(10.0)
    for phase, now_s in (("load", 13.0), ("kv", 14.0), ("load", 16.0), ("serving", 17.0)):
        clock.enter(phase, now_s)
    assert clock.elapsed_s(17.5) == 0.5
    assert clock.seconds(18.0) == {"import": 3.0, "load": 2.0, "kv": 2.0, "prove": 1.0}
