"""The flag that chooses the implementation of the part whose code failed."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.diagnosis.clues.backends import implementation
from gateway.diagnosis.clues.features import VersionSettings
from gateway.diagnosis.options import StartOptions
from tests.support.cure_reports import steps_of

FLAGS: dict[str, dict[str, Any]] = {
    "attention-backend": {"type": "str", "choices": ["fa3", "flashinfer", "triton", "frob_mha"]},
    "mm-attention-backend": {"type": "str", "choices": ["triton", "torch"]},
    "mamba-backend": {"type": "str", "choices": ["flashinfer", "triton"], "default": "triton"},
    "linear-attn-backend": {"type": "str", "choices": ["triton", "flashinfer"]},
    "storage-backend": {"type": "str", "choices": ["triton", "torch"], "ours": True},
    "attention": {"type": "bool"},
}


def find(*frames: str, **options: str) -> dict[str, Any]:
    start = StartOptions()
    start.read(f"non-default args: {options or {'model': '/m/frob'}!r}")
    return implementation(frames, VersionSettings("1.0", FLAGS, frozenset()), start)


@pytest.mark.parametrize(
    ("frame", "flag", "choices", "failed"),
    [
        (
            "sglang/srt/layers/attention/frob_mha_backend.py:forward",
            "--attention-backend",
            "flashinfer, triton",
            "frob_mha",
        ),
        (
            "sglang/srt/layers/attention/triton_backend.py:forward",
            "--attention-backend",
            "flashinfer",
            "triton",
        ),
        (
            "vllm/model_executor/layers/mamba/frob.py:forward",
            "--mamba-backend",
            "flashinfer",
            None,
        ),
        (
            "sglang/srt/layers/attention/linear/frob.py:forward",
            "--linear-attn-backend",
            "triton, flashinfer",
            None,
        ),
    ],
    ids=["named by the file", "a general one", "not the default", "the longest name"],
)
def test_the_folder_of_a_frame_leads_to_the_flag(
    frame: str, flag: str, choices: str, failed: str | None
) -> None:
    values = find("vllm/v1/worker/gpu_worker.py:run", frame, "torch/nn/modules/module.py:_call")
    assert (values["backend_flag"], values["backend_choices"]) == (flag, choices)
    assert values.get("failed_backend") == failed


@pytest.mark.parametrize(
    "frames",
    [
        ["frob/attention/triton.py:forward"],
        ["vllm/v1/core/sched/scheduler.py:schedule"],
        ["vllm/storage/frob.py:read"],
        ["sglang/srt/layers/attention/a.py:a", *["sglang/srt/managers/frob.py:run"] * 3],
    ],
    ids=["another package", "no such part", "a flag of fitserve's own", "far from the failure"],
)
def test_a_frame_of_another_part_names_no_flag(frames: list[str]) -> None:
    assert find(*frames) == {}


def test_the_backend_that_a_start_gave_is_the_failed_one() -> None:
    values = find("vllm/v1/attention/frob.py:build", attention_backend="flashinfer")
    assert (values["failed_backend"], values["backend_choices"]) == ("flashinfer", "triton")


def test_a_fault_of_a_backend_is_cured_by_another_one_or_another_version() -> None:
    steps = steps_of(
        {
            "engine": "sglang==0.5.23",
            "phase": "graphs",
            "frames": ["sglang/srt/layers/attention/flashinfer_backend.py:init_forward_metadata"],
            "raises": "ZeroDivisionError: integer division or modulo by zero",
        }
    )
    assert steps[0].startswith("Use another backend of the part that failed than flashinfer (--att")
    assert "flashinfer," not in steps[0]
    assert steps[1].startswith("Use another engine version")
