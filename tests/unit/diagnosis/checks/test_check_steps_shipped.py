"""Failures of engines, diagnosed by the kept checks of their sources."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.profiles.profiles import Profiles
from tests.support.engine_logs import log_of_row

SIGNATURES = Profiles().signatures
# Each written from the facts of an engine's source: frames, text, and the step that its check
# allows.
FAILURES: dict[str, dict[str, Any]] = {
    "a value that a backend does not read": {
        "engine": "vllm==0.20.1",
        "phase": "kv",
        "frames": [
            "vllm/v1/worker/gpu_worker.py:initialize_from_config",
            "vllm/v1/attention/backends/flash_attn.py:get_fp8_dtype_for_flashattn",
        ],
        "raises": "ValueError: Unrecognized FP8 dtype: fp8_ds_mla",
        "step": "Set --kv-cache-dtype to one of fp8, fp8_e4m3",
    },
    "two settings that exclude each other": {
        "engine": "vllm==0.33.0",
        "frames": [
            "vllm/engine/arg_utils.py:create_engine_config",
            "vllm/config/parallel.py:__post_init__",
        ],
        "raises": "ValueError: Elastic EP is not supported with pipeline parallelism"
        " (pipeline_parallel_size=2).",
        "step": "--enable-elastic-ep",
    },
    "a function that moved to another file": {
        "engine": "vllm==0.33.0",
        "frames": ["vllm/config/frob.py:verify_frob"],
        "raises": "ValueError: mm_tensor_ipc='torch_shm' is not supported with data_parallel_size"
        " > 1 or tensor_parallel_size > 1",
        "step": "--mm-tensor-ipc",
    },
    "a setting without a value": {
        "engine": "sglang==0.5.10.post1",
        "frames": ["sglang/srt/server_args.py:_handle_speculative_decoding"],
        "code": "if self.speculative_eagle_topk > 1 and self.page_size > 1:",
        "raises": "TypeError: '>' not supported between instances of 'NoneType' and 'int'",
        "kind": "config_refused",
        "step": "Set --speculative-eagle-topk",
    },
    "an assertion without words in the engine's own code": {
        "engine": "vllm==0.28.0",
        "phase": "profile",
        "frames": [
            "vllm/v1/worker/gpu_worker.py:determine_available_memory",
            "vllm/forward_context.py:make",
        ],
        "raises": "AssertionError: 4096 20",
        "kind": "engine_bug",
        "step": "Use another engine version",
    },
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_first_steps_undo_the_check(name: str) -> None:
    case = FAILURES[name]
    failure, _ = diagnose([log_of_row(case)], SIGNATURES, case["engine"])
    assert any(case["step"] in step for step in failure.steps[:2])
    if kind := case.get("kind"):
        assert failure.kind == kind
        assert failure.proven_subject == "nothing"


def test_a_failure_of_words_that_no_check_has_keeps_its_diagnosis() -> None:
    case = {"engine": "vllm==0.33.0", "raises": "ValueError: the frob of a frob is a frob"}
    failure, _ = diagnose([log_of_row(case)], SIGNATURES, "vllm==0.33.0")
    assert failure.kind == "unknown"
