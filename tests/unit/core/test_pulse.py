"""What counts as frozen, and what is only work that takes long."""

from __future__ import annotations

import pytest

from gateway.core.pulse import Pulse
from gateway.domain import EngineProcess

SILENT_S = 8.0


def process(pid: int = 1, *, cpu_s: float = 0.0, stopped: bool = False) -> EngineProcess:
    return EngineProcess(pid=pid, cpu_s=cpu_s, stopped=stopped)


def looked(*seconds: float, core_cpu: float = 0.0, answers: bool = True, metrics: object = "m") -> Pulse:
    """Looked at in these seconds; its core takes so much of a processor."""
    pulse = Pulse(0.0, SILENT_S)
    for now in seconds:
        pulse.looked(now, [process(1), process(2, cpu_s=core_cpu * now)])
        pulse.counted(now, metrics)
        pulse.checked(now, healthy=answers)
    return pulse


def test_a_process_that_is_stopped_at_two_looks_is_frozen_and_thaws() -> None:
    pulse = looked(0, 5)
    pulse.looked(10, [process(1), process(2, stopped=True)])
    assert pulse.suspicious
    assert pulse.frozen(10) == ""
    pulse.looked(11, [process(1), process(2, stopped=True)])
    assert "stopped (2)" in pulse.frozen(11)
    assert pulse.stopped_s(70) == 60
    pulse.looked(71, [process(1), process(2)])
    pulse.checked(71, healthy=True)
    assert pulse.frozen(71) == ""


def test_an_engine_that_answers_no_health_check_and_does_nothing_is_frozen() -> None:
    assert looked(0, 5, 7.9, answers=False).frozen(7.9) == ""
    silent = looked(0, 5, 8, answers=False)
    assert "no health check for 8 s" in silent.frozen(8)


@pytest.mark.parametrize("core_cpu", [0.3, 1.0])
def test_an_engine_that_answers_nothing_while_it_computes_is_not_frozen(core_cpu: float) -> None:
    """As while it collects garbage, compiles a kernel or reads a request of many megabytes."""
    busy = looked(0, 5, 8, 10, 20, core_cpu=core_cpu, answers=False)
    assert busy.frozen(20) == ""


def test_without_a_look_at_its_processes_the_silence_alone_decides() -> None:
    pulse = Pulse(0.0, SILENT_S)
    pulse.looked(5, ())
    pulse.checked(7, healthy=False)
    assert pulse.frozen(7) == ""
    pulse.checked(8, healthy=False)
    assert pulse.frozen(8) != ""


def test_a_gateway_that_stood_itself_takes_no_engine_for_frozen() -> None:
    pulse = looked(0, 5)
    pulse.looked(500, [process(1), process(2)])
    assert pulse.frozen(500) == ""


def test_a_core_that_stands_while_clients_wait_is_frozen_when_it_does_not_answer_the_smallest_request_either() -> None:
    pulse = looked(0, 5, 8)
    assert pulse.core_stands(8, None) == 0
    assert pulse.core_stands(8, 6.0) == 6
    assert pulse.frozen(9) == ""
    pulse.asked(9, alive=False)
    assert "nothing" in pulse.frozen(9)
    # Its clients are gone, and it still answers nothing.
    pulse.asked(20, alive=False)
    assert (pulse.core_stands(20, None), pulse.mute_s(20)) == (0, 11)
    assert pulse.frozen(20)
    pulse.counted(21, "more tokens")
    assert pulse.frozen(21) == ""


@pytest.mark.parametrize(
    ("core_cpu", "metrics"),
    [(1.0, "m"), (0.0, None)],
)
def test_a_core_that_works_or_of_which_nothing_is_known_stands_not(core_cpu: float, metrics: object) -> None:
    """A long prefill, a kernel that is built; an engine that tells no metrics."""
    assert looked(0, 5, 8, 20, core_cpu=core_cpu, metrics=metrics).core_stands(20, 20.0) < SILENT_S - 3


def test_a_core_that_answers_the_smallest_request_is_at_work() -> None:
    pulse = looked(0, 5, 8)
    pulse.asked(9, alive=True)
    assert pulse.core_stands(10, 10.0) == 1
