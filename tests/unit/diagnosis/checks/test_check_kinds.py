"""The kind of failure that a check of an engine's source speaks for."""

from __future__ import annotations

import pytest

from gateway.diagnosis.checks.check_kinds import check_kind, context_kind
from gateway.diagnosis.checks.check_site import CheckSite, parse_condition
from gateway.diagnosis.structure import ExceptionShape

SITE = "/opt/venv/lib/python3.12/site-packages"


def site(path: str, template: str, *conditions: str, exception: str = "ValueError") -> CheckSite:
    return CheckSite(path, "run", exception, template, tuple(map(parse_condition, conditions)))


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        (
            site("vllm/frob.py", "{} must be divisible by {}", "tp-size?model.num_heads"),
            "illegal_parallelism",
        ),
        (site("vllm/frob.py", "frob needs a size", "model.num_heads%tp-size", "tp-size>1"),
         "illegal_parallelism"),
        (site("vllm/config/frob.py", "frobs are off"), "config_refused"),
        (site("vllm/frob.py", "frobs are off", "enable-frob="), "config_refused"),
        (site("vllm/envs.py", "frobs are off", "VLLM_FROB="), "config_refused"),
        (site("vllm/lora/frob.py", "frobs are off"), "lora"),
        (site("vllm/tokenizers/frob.py", "frobs are off"), "tokenizer"),
        (site("sglang/srt/multimodal/frob.py", "frobs are off"), "multimodal"),
        (site("vllm/model_executor/model_loader/frob.py", "shape of {} differs"),
         "weights_corrupt"),
        (site("vllm/model_executor/model_loader/frob.py", "no file of {}: not found"),
         "weights_missing"),
        (site("vllm/quantization/frob.py", "not supported", "gpu.capability<90"),
         "unsupported_quantization"),
        (site("vllm/v1/attention/backends/frob.py", "only for newer GPUs", "gpu.capability<90"),
         "no_backend"),
        (site("vllm/v1/attention/backends/frob.py", "not for this", "attention-backend==frob"),
         "forced_choice_invalid"),
        (site("vllm/frob.py", "frobs need bfloat16", "gpu.capability<80"), "unsupported_dtype"),
        (site("vllm/frob.py", "please install frobkit", exception="ImportError"), "package"),
        (site("vllm/frob.py", "frobkit is not installed", "enable-frob="), "package"),
        (site("vllm/v1/core/frob.py", "the KV cache is too small for {}"), "kv_too_small"),
        (site("vllm/v1/core/frob.py", "Not enough memory for {}"), "gpu_oom"),
        (site("vllm/models/frob.py", "frobs are not supported"), "unsupported_architecture"),
        (site("vllm/v1/core/frob.py", "the table of frobs", exception="AssertionError"),
         "engine_bug"),
        (site("vllm/v1/core/frob.py", "the table of frobs"), ""),
        (site("vllm/config/frob.py", "the frobs failed: {}", "enable-frob="), ""),
    ],
)  # fmt: skip
def test_a_check_has_the_kind_of_its_conditions_and_its_part(place: CheckSite, kind: str) -> None:
    assert check_kind(place) == kind


@pytest.mark.parametrize(
    ("exception", "frames", "kind"),
    [
        ("RuntimeError", ("vllm/v1/attention/backends/frob.py:run", "torch/_ops.py:call"),
         "kernel_runtime"),
        ("OSError", ("vllm/model_executor/model_loader/frob.py:run", "safetensors/torch.py:load"),
         "weights_corrupt"),
        ("ValueError", ("vllm/tokenizers/frob.py:run", "transformers/frob.py:load"), "tokenizer"),
        ("AssertionError", ("vllm/v1/worker/frob.py:run",), "engine_bug"),
        ("RuntimeError", ("vllm/v1/worker/frob.py:run",), ""),
        ("RuntimeError", ("torch/_ops.py:call",), ""),
    ],
)  # fmt: skip
def test_the_deepest_frame_of_the_engine_decides_for_a_library(
    exception: str, frames: tuple[str, ...], kind: str
) -> None:
    named = tuple(f"{SITE}/{frame}" for frame in frames)
    assert context_kind(ExceptionShape(exception, "lost", named, "load")) == kind
