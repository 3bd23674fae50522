"""How does each version treat a quantization method as a whole? A question is a checkpoint's
quantization block, the user's `--quantization` and the dtype of the activations.

An answer is ["ok", METHOD], the method that the engine loads the checkpoint with, or ["refused",
WHY]: mismatch, unknown, deprecated, capability, dtype; online, where weights that are not quantized
cannot become so while they load; block, where the class of the method refuses the block itself
(engines/common/quantization/parse.py is for that).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import itertools
import tempfile
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")


class Question(NamedTuple):
    block: str  # a key of BLOCKS
    user: str  # --quantization; "": not given
    dtype: str
    model_type: str = "llama"


def _gptq(
    bits: int, group: int = 128, *, sym: bool = True, desc_act: bool = False
) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": sym,
        "desc_act": desc_act,
        "lm_head": False,
    }


def _awq(bits: int, group: int = 128, *, zero_point: bool = True) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": bits,
        "group_size": group,
        "zero_point": zero_point,
        "version": "gemm",
    }


def _modelopt(algorithm: str, method: str = "modelopt", **more: Any) -> dict[str, Any]:
    return {
        "quant_method": method,
        "quant_algo": algorithm,
        "ignore": ["lm_head"],
        "group_size": 16,
        **more,
    }


_INT4 = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
    "dynamic": False,
}

BLOCKS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "gptq 4": _gptq(4),
    "gptq 4 channels": _gptq(4, -1),
    "gptq 4 act-order": _gptq(4, desc_act=True),
    "gptq 4 act-order channels": _gptq(4, -1, desc_act=True),
    "gptq 4 asymmetric": _gptq(4, sym=False),
    "gptq 4 groups of 96": _gptq(4, 96),
    "gptq 4 short": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "gptq 8": _gptq(8),
    "gptq 3": _gptq(3),
    "gptq 2": _gptq(2),
    "awq 4": _awq(4),
    "awq 4 groups of 48": _awq(4, 48),
    "awq 4 symmetric": _awq(4, zero_point=False),
    "awq 8": _awq(8),
    "auto-round": {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "data_type": "int", "backend": "auto",
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4,
            "input_activations": None}},
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8 blocks": {"quant_method": "fp8", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128]},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head"]},
    "ptpc_fp8": {"quant_method": "ptpc_fp8", "activation_scheme": "dynamic"},
    "mxfp8": {"quant_method": "mxfp8", "ignored_layers": []},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "modelopt FP8": _modelopt("FP8"),
    "modelopt NVFP4": _modelopt("NVFP4"),
    "modelopt_fp4 NVFP4": _modelopt("NVFP4", "modelopt_fp4"),
    "modelopt MXFP8": _modelopt("MXFP8"),
    "modelopt FP8_PER_CHANNEL_PER_TOKEN": _modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt MIXED": _modelopt("MIXED_PRECISION",
        quantized_layers={"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}),
    "modelopt inside": {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
            "exclude_modules": []},
    },
    "quark": {
        "quant_method": "quark", "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "layer_quant_config": {},
        "layer_type_quant_config": {}, "exclude": [], "global_quant_config": {},
    },
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4"},
    "experts_int8": {"quant_method": "experts_int8"},
    "fp_quant": {"quant_method": "fp_quant", "forward_dtype": "mxfp4", "hadamard_group_size": 32,
        "modules_to_not_convert": []},
    "hqq": {"quant_method": "hqq", "weight_bits": 4},
    "aqlm": {"quant_method": "aqlm", "nbits_per_codebook": 16},
}  # fmt: skip
# Values that a user may give: of every version; --quantization of a version has only its own (the
# parser refuses the others).
USERS = (
    "awq", "awq_marlin", "auto_awq", "auto_gptq", "bitsandbytes", "compressed-tensors",
    "experts_int8", "fbgemm_fp8", "fp8",
    "fp8_per_block", "fp8_per_tensor", "gptq", "gptq_marlin", "humming", "inc", "modelopt",
    "modelopt_fp4", "modelopt_mxfp8",
    "moe_wna16", "mxfp4", "mxfp8", "quark",
)  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32")


def questions(version: str) -> Iterator[Question]:
    """The same of every version: every block without --quantization in every dtype, and with all of
    them in one."""
    for block, dtype in itertools.product(BLOCKS, DTYPES):
        yield Question(block, "", dtype)
    for block, user in itertools.product(BLOCKS, USERS):
        yield Question(block, user, "float16")
    for user, dtype in itertools.product(("", "mxfp4", "humming", "fp8"), DTYPES):
        yield Question("mxfp4", user, dtype, "gpt_oss")
    for user in ("", "fp8", "deepseek_v4_fp8"):
        yield Question("fp8 blocks", user, "bfloat16", "deepseek_v4")


def answers(version: str) -> list[list[str]]:
    """Ask the engine that this process has booted."""
    quantization_methods = importlib.import_module(
        "vllm.model_executor.layers.quantization"
    ).QUANTIZATION_METHODS
    return [
        _answer(q) if not q.user or q.user in quantization_methods else ["refused", "parser"]
        for q in questions(version)
    ]


_WORDS = {
    "does not match the quantization method": "mismatch",
    "Unknown quantization method": "unknown",
    "is deprecated": "deprecated",
    "is not supported for the current GPU": "capability",
    "is not supported for quantization": "dtype",
    "For gpt-oss model, use": "mismatch",
}


def _answer(q: Question) -> list[str]:
    torch: Any = importlib.import_module("torch")
    config: Any = importlib.import_module("vllm.config.model").ModelConfig
    block = copy.deepcopy(BLOCKS[q.block])
    hf_config = types.SimpleNamespace(
        model_type=q.model_type, num_attention_heads=8, num_key_value_heads=8
    )
    if block is not None:
        hf_config.quantization_config = block
    with tempfile.TemporaryDirectory() as folder:
        model = types.SimpleNamespace(
            model=folder, revision=None, quantization=q.user or None,
            allow_deprecated_quantization=False, hf_config=hf_config,
            hf_overrides={}, dtype=getattr(torch, q.dtype), quantization_config=_online(q.user),
            model_arch_config=types.SimpleNamespace(
                quantization_config=block, model_type=q.model_type, total_num_attention_heads=8,
                total_num_kv_heads=8
            ),
        )  # fmt: skip
        try:
            config._verify_quantization(model)
            if model.quantization is None:
                return ["ok", "none"]
            _load(model)
        except Exception as error:
            words = str(error.args[0]) if error.args else ""
            why = next(
                (name for text, name in _WORDS.items() if text in words.replace("\n", " ")), ""
            )
            return ["refused", why or ("block" if block is not None else "online")]
    return ["ok", str(model.quantization)]


def _online(user: str) -> Any:
    """The meaning of `--quantization` alone for weights that are not quantized, in the versions
    that have names for that."""
    with contextlib.suppress(ImportError):
        module: Any = importlib.import_module("vllm.config.quantization")
        return module.resolve_quantization_config(user or None, None)
    online: Any = importlib.import_module("vllm.config.model")
    resolve = getattr(online, "resolve_online_quant_config", None)
    return resolve(user or None, None) if resolve else None


def _load(model: Any) -> None:
    """VllmConfig's own check, without its questions about the files."""
    vllm_config: Any = importlib.import_module("vllm.config.vllm").VllmConfig
    quantization: Any = importlib.import_module("vllm.model_executor.layers.quantization")
    class_of = quantization.get_quantization_config(model.quantization)
    if "maybe_update_config" in vars(class_of) or inspect.getattr_static(
        class_of, "maybe_update_config", None
    ):
        class_of.maybe_update_config = lambda self, *_, **__: None
    vllm_config._get_quantization_config(model, types.SimpleNamespace(download_dir=None))
