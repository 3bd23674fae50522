"""Where does SGLang find the quantization of a checkpoint, and which method does it load then?
Questions and answers as in quant_place_questions.py."""

from __future__ import annotations

import importlib
import types
from typing import Any

from gateway.engines.inside.meta import write_folder
from gateway.engines.sglang.inside.model import configure_engine, parse_arguments
from tests.conformance.quant_place_cases import CAPABILITIES, CASES, Case
from tests.conformance.quant_place_questions import case_files, questions

__all__ = ["CAPABILITIES", "ENGINE", "OLDER_BEFORE", "answers", "questions"]

ENGINE = "sglang"
OLDER_BEFORE = "0.5.11"


def answers(version: str) -> list[list[str]]:
    """Ask the engine that this process has booted."""
    return [_answer(CASES[name]) for name, _ in questions(version)]


def _answer(case: Case) -> list[str]:
    with write_folder(case_files(case)) as folder:
        try:
            configuration = configure_engine(parse_arguments(folder, []))
        except Exception:  # an engine's refusal is an answer
            return ["refused"]
    return ["ok", configuration.model.quantization or "none", _cache(configuration.quantization)]


def _cache(quantization: Any) -> str:
    """The KV cache dtype that a model with this quantization has; "auto": that of its weights."""
    torch: Any = importlib.import_module("torch")
    model = types.SimpleNamespace(quant_config=quantization)
    try:
        configure = importlib.import_module(
            "sglang.srt.mem_cache.kv_cache_dtype"
        ).configure_kv_cache_dtype
    except ModuleNotFoundError:  # up to 0.5.15 at least the runner decides
        runner = types.SimpleNamespace(
            model=model, server_args=types.SimpleNamespace(kv_cache_dtype="auto"), dtype=None
        )
        owner: Any = importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner
        owner.configure_kv_cache_dtype(runner)
        return str(runner.server_args.kv_cache_dtype)
    dtype, _ = configure(
        server_args_kv_cache_dtype="auto", model=model, model_dtype=torch.bfloat16,
        is_draft_worker=False, is_dflash=False, speculative_draft_attention_backend="",
    )  # fmt: skip
    return dtype or "auto"
