"""How does each SGLang version treat a quantization method as a whole? Questions and answers as in
method_questions.py.

["ok", METHOD] or ["refused", WHY]; WHY is mismatch, unknown, capability, dtype, or block, where the
class refuses the block.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import tempfile
import types
from collections.abc import Iterator
from typing import Any

from tests.conformance.method_questions import BLOCKS, DTYPES, Question

ENGINE = "sglang"
CAPABILITIES = ("9.0",)
USERS = (
    "auto-round-int8", "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "fp8", "gptq",
    "gptq_marlin", "humming",
    "modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "moe_wna16", "mxfp4", "mxfp8",
    "nvfp4_online", "petit_nvfp4",
    "quark_mxfp4", "w4afp8", "w8a8_fp8", "w8a8_int8",
)  # fmt: skip


def questions(version: str) -> Iterator[Question]:
    """The same of every version. Unquantized weights are not asked about: get_quant_config is, by
    gateway/engines/sglang/inside/facts.py."""
    del version
    blocks = [name for name, block in BLOCKS.items() if block is not None]
    for block, dtype in itertools.product(blocks, DTYPES):
        yield Question(block, "", dtype)
    for block, user in itertools.product(blocks, USERS):
        yield Question(block, user, "float16")


def answers(version: str) -> list[list[str]]:
    """Ask the engine that this process has booted."""
    return [_answer(question) for question in questions(version)]


_WORDS = {
    "does not match the quantization method": "mismatch",
    "Unknown quantization method": "unknown",
    "is not supported for the current GPU": "capability",
    "is not supported for quantization": "dtype",
}


def _answer(q: Question) -> list[str]:
    torch: Any = importlib.import_module("torch")
    config: Any = importlib.import_module("sglang.srt.configs.model_config").ModelConfig
    loader: Any = importlib.import_module("sglang.srt.model_loader.loader")
    transformers: Any = importlib.import_module("transformers")
    with tempfile.TemporaryDirectory() as folder:
        hf_config = transformers.PretrainedConfig(architectures=["LlamaForCausalLM"])
        hf_config.quantization_config = copy.deepcopy(BLOCKS[q.block])
        model = types.SimpleNamespace(
            model_path=folder, revision=None, quantization=q.user or None, hf_config=hf_config,
            hf_text_config=hf_config,
            is_draft_model=False, is_draft_quantization_explicit=False,
            dtype=getattr(torch, q.dtype), is_fp4_experts=False,
        )  # fmt: skip
        for name in ("_parse_quant_hf_config", "_parse_modelopt_quant_config"):
            setattr(model, name, types.MethodType(getattr(config, name), model))
        model._find_quant_modelslim_config = lambda: None
        loader.get_model_architecture = lambda _: (types.SimpleNamespace(), "LlamaForCausalLM")
        try:
            config._verify_quantization(model)
            loader._get_quantization_config(
                model, types.SimpleNamespace(model_loader_extra_config=None)
            )
        except Exception as error:
            words = str(error.args[0]) if error.args else ""
            why = next(
                (name for text, name in _WORDS.items() if text in words.replace("\n", " ")), "block"
            )
            return ["refused", why]
    return ["ok", str(model.quantization)]
