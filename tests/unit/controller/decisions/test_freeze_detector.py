"""Engines that count as frozen, and engines whose work only takes long."""

from __future__ import annotations

import pytest

from gateway.controller.decisions.freeze_detector import FreezeDetector, longest_step_s
from gateway.domain import Choice, EngineProcess, LayerAttention
from tests.support.makers import plan

SILENT_S, ASK_S = 8.0, 3.0


def process(
    pid: int = 1, *, cpu_s: float = 0.0, stopped: bool = False, command: str = ""
) -> EngineProcess:
    return EngineProcess(pid=pid, cpu_s=cpu_s, is_stopped=stopped, command=command)


def changed_choice(value: int) -> Choice[int]:
    return Choice[int](value=value, reason="a test", source="a test")


def detector_after(
    *seconds: float, core_cpu: float = 0.0, answers: bool = True, metrics: object = "m"
) -> FreezeDetector:
    """Looked at in these seconds; its core takes so much of a processor."""
    detector = FreezeDetector(0.0, SILENT_S)
    for now in seconds:
        detector.record_processes(now, [process(1), process(2, cpu_s=core_cpu * now)])
        detector.record_metrics(now, metrics)
        detector.record_health(now, is_healthy=answers)
    return detector


def test_a_process_that_is_stopped_at_two_looks_is_frozen_and_thaws() -> None:
    detector = detector_after(0, 5)
    detector.record_processes(10, [process(1), process(2, stopped=True)])
    assert detector.is_suspicious
    assert detector.freeze_reason(10) == ""
    detector.record_processes(11, [process(1), process(2, stopped=True)])
    assert "stopped (2)" in detector.freeze_reason(11)
    assert detector.stopped_s(70) == 60
    detector.record_processes(71, [process(1), process(2)])
    detector.record_health(71, is_healthy=True)
    assert detector.freeze_reason(71) == ""


def test_an_engine_that_answers_no_health_check_and_does_nothing_is_frozen() -> None:
    assert detector_after(0, 5, 7.9, answers=False).freeze_reason(7.9) == ""
    silent = detector_after(0, 5, 8, answers=False)
    assert "no health check for 8 s" in silent.freeze_reason(8)


@pytest.mark.parametrize("core_cpu", [0.3, 1.0])
def test_an_engine_that_answers_nothing_while_it_computes_is_not_frozen(core_cpu: float) -> None:
    """As while it collects garbage, compiles a kernel or reads a request of many megabytes."""
    busy = detector_after(0, 5, 8, 10, 20, core_cpu=core_cpu, answers=False)
    assert busy.freeze_reason(20) == ""


def test_the_silence_alone_decides_without_a_look_at_the_processes() -> None:
    detector = FreezeDetector(0.0, SILENT_S)
    detector.record_processes(5, ())
    detector.record_health(7, is_healthy=False)
    assert detector.freeze_reason(7) == ""
    detector.record_health(8, is_healthy=False)
    assert detector.freeze_reason(8) != ""


def test_a_gateway_that_stood_itself_takes_no_engine_for_frozen() -> None:
    detector = detector_after(0, 5)
    detector.record_processes(500, [process(1), process(2)])
    assert detector.freeze_reason(500) == ""


def test_a_core_is_frozen_when_clients_wait_and_the_smallest_request_gets_no_answer() -> None:
    detector = detector_after(0, 5, 8)
    assert not detector.needs_probe(8, None, ASK_S)
    assert not detector.needs_probe(8, 4.9, ASK_S)
    assert detector.needs_probe(8, 5.0, ASK_S)
    assert detector.freeze_reason(9) == ""
    detector.record_probe(9, is_alive=False)
    assert "does nothing" in detector.freeze_reason(9)
    # Its clients are gone, and it still answers nothing.
    detector.record_probe(20, is_alive=False)
    assert (detector.needs_probe(20, None, ASK_S), detector.silent_seconds(20)) == (False, 11)
    assert detector.freeze_reason(20)
    detector.record_metrics(21, "more tokens")
    assert detector.freeze_reason(21) == ""


@pytest.mark.parametrize(("core_cpu", "metrics"), [(1.0, "m"), (0.0, None)])
def test_a_busy_core_or_an_engine_without_metrics_is_not_frozen(
    core_cpu: float, metrics: object
) -> None:
    """A long prefill, a kernel that is built; an engine that tells no metrics."""
    assert not detector_after(0, 5, 8, 20, core_cpu=core_cpu, metrics=metrics).needs_probe(
        20, 20.0, ASK_S
    )


def test_a_core_that_answers_the_smallest_request_is_at_work() -> None:
    detector = detector_after(0, 5, 8)
    detector.record_probe(9, is_alive=True)
    assert not detector.needs_probe(10, 10.0, ASK_S)


def spinning_detector(step_s: float) -> FreezeDetector:
    detector = detector_after(0, 5, 10, 15, 20, core_cpu=1.0)
    detector.step_s = step_s
    return detector


def test_a_core_that_exceeds_a_step_is_asked_and_is_frozen_without_an_answer() -> None:
    assert spinning_detector(2).needs_probe(8, 8.0, ASK_S)
    assert not spinning_detector(20).needs_probe(19.9, 19.9, ASK_S)
    detector = spinning_detector(20)
    assert detector.needs_probe(20, 20.0, ASK_S)
    detector.record_probe(20, is_alive=False)
    for now in (24, 27.9):
        detector.record_processes(now, [process(1), process(2, cpu_s=now)])
        assert detector.freeze_reason(now) == ""
    assert "computes without an end" in detector.freeze_reason(28)
    detector.record_metrics(32, "a step has ended")
    assert detector.freeze_reason(40) == ""


def test_a_core_that_waits_for_a_compiler_is_at_work() -> None:
    detector = spinning_detector(2)
    detector.record_processes(
        12,
        [
            process(1),
            process(2, cpu_s=12),
            process(3, command="/usr/local/cuda/bin/nvcc -c sampling.cu"),
        ],
    )
    assert not detector.needs_probe(15, 15.0, ASK_S)


def test_the_time_limit_of_a_step_follows_from_the_time_of_a_full_one() -> None:
    """The prompt was half a step; of a context of sixteen such prompts the last is read beside
    fifteen others."""
    attention = (LayerAttention(kind="full", layers=32, head_dim=128, backend="a", status="ok"),)
    lengths = {
        "max_model_len": changed_choice(16_000),
        "max_num_batched_tokens": changed_choice(2000),
    }
    known_plan = plan().evolve(**lengths, attention=attention)
    assert longest_step_s(known_plan, 1000, 0.25) == 0.25 * 2 * 2 * 16
    # A prefill of windows or states shows no use of the cache before its end.
    sliding = known_plan.evolve(attention=(attention[0].evolve(kind="sliding"),))
    assert longest_step_s(sliding, 1000, 0.25) == 0.25 * 2 * 16 * 2 * 16
    assert longest_step_s(
        known_plan.evolve(max_model_len=changed_choice(1002)), 1000, 0.25
    ) == pytest.approx(0.25 * 2 * 2, rel=0.01)
