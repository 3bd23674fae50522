"""What counts as frozen, and what is only work that takes long."""

from __future__ import annotations

import pytest

from gateway.controller.decisions.freeze_detector import FreezeDetector, longest_step_s
from gateway.domain import Choice, EngineProcess, LayerAttention
from tests.support.makers import plan

SILENT_S, ASK_S = 8.0, 3.0


def process(
    pid: int = 1, *, cpu_s: float = 0.0, stopped: bool = False, command: str = ""
) -> EngineProcess:
    return EngineProcess(pid=pid, cpu_s=cpu_s, stopped=stopped, command=command)


def changed(value: int) -> Choice[int]:
    return Choice[int](value=value, reason="a test", source="a test")


def looked(
    *seconds: float, core_cpu: float = 0.0, answers: bool = True, metrics: object = "m"
) -> FreezeDetector:
    """Looked at in these seconds; its core takes so much of a processor."""
    pulse = FreezeDetector(0.0, SILENT_S)
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
    pulse = FreezeDetector(0.0, SILENT_S)
    pulse.looked(5, ())
    pulse.checked(7, healthy=False)
    assert pulse.frozen(7) == ""
    pulse.checked(8, healthy=False)
    assert pulse.frozen(8) != ""


def test_a_gateway_that_stood_itself_takes_no_engine_for_frozen() -> None:
    pulse = looked(0, 5)
    pulse.looked(500, [process(1), process(2)])
    assert pulse.frozen(500) == ""


def test_a_core_that_stands_while_clients_wait_is_frozen_when_it_does_not_answer_the_smallest_request_either() -> (
    None
):
    pulse = looked(0, 5, 8)
    assert not pulse.doubtful(8, None, ASK_S)
    assert not pulse.doubtful(8, 4.9, ASK_S)
    assert pulse.doubtful(8, 5.0, ASK_S)
    assert pulse.frozen(9) == ""
    pulse.asked(9, alive=False)
    assert "does nothing" in pulse.frozen(9)
    # Its clients are gone, and it still answers nothing.
    pulse.asked(20, alive=False)
    assert (pulse.doubtful(20, None, ASK_S), pulse.silent_seconds(20)) == (False, 11)
    assert pulse.frozen(20)
    pulse.counted(21, "more tokens")
    assert pulse.frozen(21) == ""


@pytest.mark.parametrize(("core_cpu", "metrics"), [(1.0, "m"), (0.0, None)])
def test_a_core_that_works_or_of_which_nothing_is_known_stands_not(
    core_cpu: float, metrics: object
) -> None:
    """A long prefill, a kernel that is built; an engine that tells no metrics."""
    assert not looked(0, 5, 8, 20, core_cpu=core_cpu, metrics=metrics).doubtful(20, 20.0, ASK_S)


def test_a_core_that_answers_the_smallest_request_is_at_work() -> None:
    pulse = looked(0, 5, 8)
    pulse.asked(9, alive=True)
    assert not pulse.doubtful(10, 10.0, ASK_S)


def spinning(step_s: float) -> FreezeDetector:
    pulse = looked(0, 5, 10, 15, 20, core_cpu=1.0)
    pulse.step_s = step_s
    return pulse


def test_a_core_that_computes_for_longer_than_a_step_takes_is_asked_and_is_frozen_when_it_stays_mute() -> (
    None
):
    assert spinning(2).doubtful(8, 8.0, ASK_S)
    assert not spinning(20).doubtful(19.9, 19.9, ASK_S)
    pulse = spinning(20)
    assert pulse.doubtful(20, 20.0, ASK_S)
    pulse.asked(20, alive=False)
    for now in (24, 27.9):
        pulse.looked(now, [process(1), process(2, cpu_s=now)])
        assert pulse.frozen(now) == ""
    assert "computes without an end" in pulse.frozen(28)
    pulse.counted(32, "a step has ended")
    assert pulse.frozen(40) == ""


def test_a_core_that_waits_for_a_compiler_is_at_work() -> None:
    pulse = spinning(2)
    pulse.looked(
        12,
        [
            process(1),
            process(2, cpu_s=12),
            process(3, command="/usr/local/cuda/bin/nvcc -c sampling.cu"),
        ],
    )
    assert not pulse.doubtful(15, 15.0, ASK_S)


def test_how_long_a_step_may_take_follows_from_what_a_full_one_took() -> None:
    """The prompt was half a step; of a context of sixteen such prompts the last is read beside
    fifteen others."""
    attention = (LayerAttention(kind="full", layers=32, head_dim=128, backend="a", status="ok"),)
    lengths = {"max_model_len": changed(16_000), "max_num_batched_tokens": changed(2000)}
    known = plan().evolve(**lengths, attention=attention)
    assert longest_step_s(known, 1000, 0.25) == 0.25 * 2 * 2 * 16
    # Of windows, and of states, a prefill shows nothing before its end.
    sliding = known.evolve(attention=(attention[0].evolve(kind="sliding"),))
    assert longest_step_s(sliding, 1000, 0.25) == 0.25 * 2 * 16 * 2 * 16
    assert longest_step_s(known.evolve(max_model_len=changed(1002)), 1000, 0.25) == pytest.approx(
        0.25 * 2 * 2, rel=0.01
    )
