"""The last step of a start, which its cure depends on."""

from __future__ import annotations

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.domain import Failure
from gateway.profiles.profiles import Profiles

SIGNATURES = Profiles().signatures
LATE = (
    "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by"
    " slow weight loading for large models. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S)"
)
CONNECTION = "world_size=2 rank=0 local_rank=0 distributed_init_method=tcp://[::1]:5 backend=nccl"


def read(*lines: str) -> Failure:
    head = "(Worker_TP0 pid=7) INFO 03-14 10:22:05 [frob.py:7] "
    text = "\n".join((*(head + line for line in lines), LATE))
    return diagnose([text.encode()], SIGNATURES, "vllm")[0]


@pytest.mark.parametrize(
    ("line", "activity", "step"),
    [
        (CONNECTION, "connecting its ranks (NCCL)", "NCCL_P2P_DISABLE=1"),
        ("Fetching 163 files:  12%|", "downloading weights", "Download the model"),
        ("Starting to load model /m...", "loading weights", "VLLM_ENGINE_READY_TIMEOUT_S, above"),
        ("DeepGEMM warmup:  41%", "compiling or tuning kernels", "VLLM_ENGINE_READY_TIMEOUT_S"),
        ("Dynamo bytecode transform time: 4.1 s", "compiling", "VLLM_ENGINE_READY_TIMEOUT_S"),
        ("Capturing CUDA graphs", "capturing graphs", "VLLM_ENGINE_READY_TIMEOUT_S"),
    ],
)
def test_a_start_that_took_too_long_names_its_last_step(
    line: str, activity: str, step: str
) -> None:
    failure = read(line)
    assert failure.kind == "start_timeout"
    assert failure.message == (
        f"The engine did not start within 600 s: it was last seen {activity}."
    )
    assert step in failure.steps[0]


def test_a_step_ends_with_the_next_step_or_phase() -> None:
    rank = "rank 0 in world size 2 is assigned as DP rank 0, PP rank 0, TP rank 0"
    for line in (rank, "Starting to load model /m..."):
        failure = read(CONNECTION, line)
        assert "NCCL" not in failure.message + failure.steps[0]
    assert "connecting" in read("Starting to load model /m...", CONNECTION).message


def test_an_error_of_a_rank_is_the_cause_of_the_late_start() -> None:
    rank = "ERROR 03-14 10:22:05 [w.py:7] torch.OutOfMemoryError: CUDA out of memory. Tried to"
    lines = ["Traceback (most recent call last):", rank + " allocate 2.00 GiB.", LATE]
    assert diagnose(["\n".join(lines).encode()], SIGNATURES, "vllm")[0].kind == "gpu_oom"
