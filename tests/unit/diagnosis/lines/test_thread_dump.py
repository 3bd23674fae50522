"""The function that a process waits in, as py-spy prints it, leads to the steps of a hang."""

from __future__ import annotations

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.lines.thread_dump import ThreadDump
from gateway.profiles.profiles import Profiles

SIGNATURES = Profiles().signatures
MAIN = [
    'Thread 0x7F01 (active): "MainThread"',
    "    top_k_top_p_sampling_from_logits (flashinfer/sampling.py:512)",
    "    flashinfer_sample (vllm/v1/sample/ops/topk_topp_sampler.py:300)",
    "    execute_model (vllm/v1/worker/gpu_model_runner.py:1200)",
    "    <module> (vllm:8)",
]
OTHER = ['Thread 0x7F02 (idle): "Thread-1"', "    wait (threading.py:331)"]


def frames_of(lines: list[str]) -> tuple[str, ...]:
    dump = ThreadDump()
    for line in lines:
        dump.read(line)
    return dump.frames


def test_the_first_thread_is_read_with_its_innermost_function_last() -> None:
    first = (
        "vllm/v1/worker/gpu_model_runner.py:execute_model",
        "vllm/v1/sample/ops/topk_topp_sampler.py:flashinfer_sample",
        "flashinfer/sampling.py:top_k_top_p_sampling_from_logits",
    )
    assert frames_of(MAIN) == first
    assert frames_of([*MAIN, *OTHER]) == first
    assert frames_of(["frob (frob.py:1)", *MAIN, *MAIN]) == first
    # A thread without a function in Python is passed over.
    assert frames_of([OTHER[0], *MAIN]) == first


def test_a_dump_has_a_bound() -> None:
    deep = [f"    frob{number} (frob/frob.py:{number})" for number in range(1000)]
    assert len(frames_of([MAIN[0], *deep])) < 100


def test_lines_without_a_dump_have_no_frames() -> None:
    assert frames_of(["    frob (frob.py:7)", "INFO: frob"]) == ()


def test_the_place_in_which_an_engine_waits_gives_the_first_step() -> None:
    log_of_service = [
        "INFO 03-14 10:20:05 [frob.py:7] frob",
        "INFO:     Application startup complete.",
    ]
    log = "\n".join([*log_of_service, "$ py-spy dump --pid 7", *MAIN, *OTHER]) + "\n"
    failure, _ = diagnose([log.encode()], SIGNATURES, "vllm==0.26.0")
    assert failure.kind == "hang"
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in failure.steps[0]
