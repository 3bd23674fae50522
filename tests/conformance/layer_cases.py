"""Which models, with which quantization, the engine and the rules are both asked to build. Shared
by question and test."""

from __future__ import annotations

import json
from typing import Any

from tests.support.paths import MODELS

TENSOR_PARALLEL = (1, 2, 4, 8)

_ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
_MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
_RECURRENT = [
    f"linear_attn.{name}"
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
]


def _compress(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    } | more


def _numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    } | more


# An engine learns the quantized layers from a GPTQ or AWQ checkpoint's headers; these blocks say it
# themselves.
QUANTS: dict[str, dict[str, Any]] = {
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
        "modules_in_block_to_quantize": [*_ATTENTION, *_MLP],
    },
    "gptq-act-order": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True,
        "modules_in_block_to_quantize": [*_ATTENTION, *_MLP],
    },
    "gptq-dynamic": {
        "quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False,
        "modules_in_block_to_quantize": [_ATTENTION, _MLP],
        "dynamic": {r"-:.*\.layers\.0\..*": {},
            r"+:.*\.layers\.[12]\..*": {"bits": 8, "group_size": 32}},
    },
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head", "layers.0.self_attn"],
    },
    "auto-round": {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
    },
    "auto-round-extra": {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
        "packing_format": "auto_round:auto_gptq", "extra_config": {
            **{f"model.layers.0.self_attn.{name}_proj": {"bits": 16,
                "data_type": "float"} for name in "qkvo"},
            r".*layers\.1\.mlp.*": {"bits": 8, "group_size": 32},
        },
    },
    "auto-round-language": {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": "model.language_model.layers",
    },
    "gptq-language": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
        "modules_in_block_to_quantize": [*_ATTENTION, *_MLP, *_RECURRENT],
    },
    "w4a16": _compress("pack-quantized", _numbers(4, "int", "group", group_size=128), None),
    "w8a16": _compress("pack-quantized", _numbers(8, "int", "channel"), None),
    "int8": _compress("int-quantized", _numbers(8, "int", "channel"),
        _numbers(8, "int", "token", dynamic=True)),
    "fp8-dynamic": _compress(
        "float-quantized", _numbers(8, "float", "channel"),
        _numbers(8, "float", "token", dynamic=True),
        ignore=["lm_head", "re:.*mlp.gate$", "re:.*layers.0.self_attn.(q|k|v)_proj"],
    ),
    "fp8-static": _compress("float-quantized", _numbers(8, "float", "tensor"),
        _numbers(8, "float", "tensor")),
    "fp8-ct-block": _compress(
        "float-quantized", _numbers(8, "float", "block", block_structure=[128, 128]),
        _numbers(8, "float", "group", group_size=128, dynamic=True),
        ignore=["re:.*mlp.gate$", "lm_head"],
    ),
    "nvfp4": _compress(
        "nvfp4-pack-quantized", _numbers(4, "float", "tensor_group", group_size=16),
        _numbers(4, "float", "tensor_group", group_size=16, dynamic="local"),
        ignore=["re:.*mlp.gate$", "lm_head"],
    ),
    "mxfp4-ct": _compress(
        "mxfp4-pack-quantized", _numbers(4, "float", "group", group_size=32),
        _numbers(4, "float", "group", group_size=32, dynamic=True),
        ignore=["lm_head", "re:.*router$", "re:.*self_attn.*"],
    ),
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-block": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "ignored_layers": ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
            "model.layers.0.self_attn.v_proj"],
    },
    "modelopt-fp8": {
        "quant_method": "modelopt", "quant_algo": "FP8",
        "ignore": ["lm_head", "model.layers.0.self_attn*"],
        "producer": {"name": "modelopt", "version": "0.39.0"},
    },
    "modelopt-nvfp4": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*mlp.gate"],
        "group_size": 16,
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16},
            "targets": ["Linear"]}},
        "producer": {"name": "modelopt", "version": "0.39.0"},
    },
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
            "model.embed_tokens", "lm_head"],
    },
}  # fmt: skip

PUBLISHED = [
    "deepseek-v2-lite",
    "deepseek-v3",
    "gemma-2-9b",
    "gemma-3-1b",
    "glm-4.5-air",
    "gpt-oss-20b",
    "granite-3.1-2b",
    "llama-3.1-8b",
    "llama-3.2-1b",
    "mistral-7b-v0.1",
    "mistral-7b-v0.3",
    "mixtral-8x7b",
    "phi-4",
    "qwen1.5-moe-a2.7b",
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "qwen3-30b-a3b",
    "qwen3-8b",
    "qwen3-next-80b-a3b",
    "qwen3.6-35b-a3b",
]
CASES: tuple[tuple[str, str], ...] = (
    *((name, "none") for name in PUBLISHED),
    *(
        ("llama-3.1-8b", name)
        for name in QUANTS
        if name not in ("mxfp4", "mxfp4-ct") and not name.endswith("-language")
    ),
    *(
        ("qwen3-30b-a3b", name)
        for name in (
            "gptq",
            "awq",
            "auto-round",
            "w4a16",
            "fp8-dynamic",
            "fp8-block",
            "nvfp4",
            "modelopt-nvfp4",
        )
    ),
    ("gpt-oss-20b", "mxfp4"),
    ("gpt-oss-20b", "mxfp4-ct"),
    ("qwen3.6-35b-a3b", "auto-round-language"),
    ("qwen3.6-35b-a3b", "gptq"),
    ("qwen3.6-35b-a3b", "gptq-language"),
    ("qwen3.6-35b-a3b", "fp8-block"),
    ("qwen3-next-80b-a3b", "fp8-block"),
    ("qwen3-next-80b-a3b", "awq"),
    ("deepseek-v3", "fp8-block"),
)


def case(model: str, quant: str) -> dict[str, Any]:
    """The config.json of this case."""
    config: dict[str, Any] = json.loads((MODELS / f"{model}.json").read_text())
    return config if quant == "none" else config | {"quantization_config": QUANTS[quant]}
