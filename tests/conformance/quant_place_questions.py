"""Where does vLLM find the quantization of a checkpoint, and which method does it load then?

A question is a name of CASES, with a digest of its files. An answer is ["ok", METHOD, KV CACHE
DTYPE], where METHOD is "none" for weights that it takes for unquantized, or ["refused"].
"""

from __future__ import annotations

import hashlib
import importlib
import json
from typing import Any

from gateway.engines.inside.meta import write_folder
from gateway.engines.vllm.inside.model import parse_engine_arguments
from tests.conformance.model_cases import OLDER_BEFORE
from tests.conformance.quant_place_cases import CAPABILITIES, CASES, Case, files

__all__ = ["CAPABILITIES", "OLDER_BEFORE", "answers", "questions"]


def questions(version: str) -> list[tuple[str, str]]:
    """The same of every version."""
    return [
        (name, hashlib.sha256(json.dumps(files(case)).encode()).hexdigest()[:12])
        for name, case in CASES.items()
    ]


def answers(version: str) -> list[list[str]]:
    """Ask the engine that this process has booted."""
    return [_answer(CASES[name]) for name, _ in questions(version)]


def case_files(case: Case) -> dict[str, bytes]:
    """The files of a case."""
    config, file = files(case)
    config_files = {"config.json": config} | (
        {} if file is None else {"hf_quant_config.json": file}
    )
    return {name: json.dumps(content).encode() for name, content in config_files.items()}


def _answer(case: Case) -> list[str]:
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()
    utils: Any = importlib.import_module("vllm.utils.torch_utils")
    vllm_config: Any = importlib.import_module("vllm.config.vllm").VllmConfig
    with write_folder(case_files(case)) as folder:
        try:
            arguments = parse_engine_arguments(folder, [])
            model, load = arguments.create_model_config(), arguments.create_load_config()
            if model.quantization is not None:
                vllm_config._get_quantization_config(model, load)
            cache = utils.resolve_kv_cache_dtype_string("auto", model)
        except Exception:  # an engine's refusal is an answer
            return ["refused"]
    return ["ok", model.quantization or "none", cache]
