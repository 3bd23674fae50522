"""Where published checkpoints keep their quantization block, in the shapes of their publishers.

The algorithms, fields and wildcards are those of ModelOpt's exports from 0.15 to 0.44 and of the
checkpoints named beside them; sizes are those of small models. Shared by question and test.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.conformance.layer_cases import case as published

CAPABILITIES = ("10.0",)


class Case(NamedTuple):
    """One checkpoint. block: of `place` in config.json. file: content of hf_quant_config.json."""

    model: str = "llama-3.1-8b"
    place: str = ""
    block: dict[str, Any] | None = None
    file: dict[str, Any] | None = None


def _file(algorithm: str | None, producer: str = "0.23.0", **more: Any) -> dict[str, Any]:
    """hf_quant_config.json as ModelOpt writes it; producer: "" for none."""
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": None, **more}
    head = {"producer": {"name": "modelopt", "version": producer}} if producer else {}
    return {**head, "quantization": inner}


def _flat(algorithm: str, **more: Any) -> dict[str, Any]:
    """The block of config.json as ModelOpt writes it from 0.31 on."""
    return {
        "quant_algo": algorithm,
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.37.0"},
        "quant_method": "modelopt",
        **more,
    }


_HEAD: dict[str, Any] = {"exclude_modules": ["lm_head"]}
_FP8_KV: dict[str, Any] = {"kv_cache_quant_algo": "FP8"}
_GROUPS: dict[str, Any] = {"group_size": 16}
_SCHEME: dict[str, Any] = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
_LAYERS: dict[str, Any] = {
    "quantized_layers": {
        f"model.layers.{layer}.{name}": {"quant_algo": "FP8"}
        if "attn" in name
        else {"quant_algo": "NVFP4", "group_size": 16}
        for layer in range(2)
        for name in (
            *(f"self_attn.{part}_proj" for part in "qkvo"),
            *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
        )
    }
}
_W4A8_LAYERS: dict[str, Any] = {
    "quantized_layers": {
        "model.layers.0.mlp.up_proj": {"quant_algo": "W4A8_AWQ", "group_size": 128},
        "model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
    }
}
_COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": None,
        }
    },
}
_GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
}
_OUTER, _OLD, _TEXT = "quantization_config", "compression_config", "text_config.quantization_config"

CASES: dict[str, Case] = {
    # nvidia/Llama-3.1-70B-Instruct-FP8, Mistral-7B, Mixtral: the file alone
    "file FP8, KV FP8": Case(file=_file("FP8", **_FP8_KV, **_HEAD)),
    "file FP8": Case(file=_file("FP8", **_HEAD)),
    "file fp8 in small letters": Case(file=_file("fp8", **_HEAD)),
    "file FP8 of an old producer": Case(file=_file("FP8", "0.15.1", **_FP8_KV)),
    "file FP8 without producer": Case(file=_file("FP8", "", **_FP8_KV, **_HEAD)),
    "file FP8 of channels": Case(file=_file("FP8_PER_CHANNEL_PER_TOKEN", **_HEAD)),
    "file FP8 of blocks": Case(file=_file("FP8_PB_WO", **_HEAD)),
    # nvidia/DeepSeek-R1-FP4, Qwen3-235B-A22B-NVFP4: groups of 16, experts' gates excluded by name
    "file NVFP4, KV FP8": Case(file=_file("NVFP4", **_GROUPS, **_FP8_KV, **_HEAD)),
    "file NVFP4": Case(file=_file("NVFP4", **_GROUPS, **_HEAD)),
    "file NVFP4, KV NVFP4": Case(
        file=_file("NVFP4", **_GROUPS, **_HEAD, kv_cache_quant_algo="NVFP4")
    ),
    "file NVFP4 without group size": Case(file=_file("NVFP4", **_HEAD)),
    "file NVFP4 without exclusions": Case(file=_file("NVFP4", **_GROUPS)),
    "file NVFP4 without producer": Case(file=_file("NVFP4", "", **_GROUPS, **_HEAD)),
    "file NVFP4_AWQ": Case(file=_file("NVFP4_AWQ", **_GROUPS, **_HEAD)),
    "file W4A16_NVFP4": Case(file=_file("W4A16_NVFP4", **_GROUPS, **_HEAD)),
    "file MXFP8": Case(file=_file("MXFP8", group_size=32, **_HEAD)),
    "file W4A8_MXFP4_FP8": Case(file=_file("W4A8_MXFP4_FP8", group_size=32, **_HEAD)),
    # integer exports for TensorRT-LLM
    "file W4A8_AWQ": Case(
        file=_file("W4A8_AWQ", group_size=128, has_zero_point=False, pre_quant_scale=True, **_HEAD)
    ),
    "file W4A16_AWQ": Case(file=_file("W4A16_AWQ", group_size=128, has_zero_point=False, **_HEAD)),
    "file W8A8_SQ_PER_CHANNEL": Case(file=_file("W8A8_SQ_PER_CHANNEL", **_HEAD)),
    "file MIXED": Case(file=_file("MIXED_PRECISION", **_FP8_KV, **_LAYERS)),
    "file MIXED of W4A8_AWQ": Case(file=_file("MIXED_PRECISION", **_W4A8_LAYERS)),
    "file MIXED without layers": Case(file=_file("MIXED_PRECISION")),
    "file KV alone": Case(file=_file(None, **_FP8_KV)),
    "file flat FP8": Case(file=_flat("FP8", **_FP8_KV)),
    "file flat NVFP4": Case(file=_flat("NVFP4", **_GROUPS)),
    # config.json as ModelOpt writes it later, with and without the file
    "flat FP8": Case(place=_OUTER, block=_flat("FP8", **_SCHEME)),
    "flat FP8, KV by name": Case(place=_OUTER, block=_flat("FP8", **_FP8_KV)),
    "flat NVFP4": Case(place=_OUTER, block=_flat("NVFP4", **_GROUPS, **_SCHEME)),
    "flat NVFP4 beside its file": Case(
        place=_OUTER,
        block=_flat("NVFP4", **_GROUPS, **_SCHEME),
        file=_file("NVFP4", **_GROUPS, **_FP8_KV, **_HEAD),
    ),
    "flat MIXED": Case(place=_OUTER, block=_flat("MIXED_PRECISION", **_LAYERS, **_SCHEME)),
    "flat MIXED, layers in the file": Case(
        place=_OUTER,
        block=_flat("MIXED_PRECISION", **_SCHEME),
        file=_file("MIXED_PRECISION", "0.37.0", **_FP8_KV, **_LAYERS),
    ),
    "flat W4A8_AWQ": Case(place=_OUTER, block=_flat("W4A8_AWQ", group_size=128)),
    "nested FP8": Case(place=_OUTER, block=_file("FP8", **_FP8_KV, **_HEAD)),
    "nested NVFP4": Case(place=_OUTER, block=_file("NVFP4", **_GROUPS, **_HEAD)),
    "nested MXFP8": Case(place=_OUTER, block=_file("MXFP8", group_size=32, **_HEAD)),
    "gptq beside a file": Case(place=_OUTER, block=_GPTQ, file=_file("FP8", **_HEAD)),
    # other places
    "compression_config": Case(place=_OLD, block=_COMPRESSED),
    "compression_config beside a file": Case(
        place=_OLD, block=_COMPRESSED, file=_file("FP8", **_HEAD)
    ),
    **{
        f"text_config of {model}": Case(model, _TEXT, _COMPRESSED)
        for model in ("gemma-3-27b", "qwen3-vl-8b", "qwen3.5-9b")
    },
    "text_config beside a file": Case(
        "qwen3-vl-8b", _TEXT, _COMPRESSED, _file("FP8", **_FP8_KV, **_HEAD)
    ),
    "text_config, ModelOpt": Case("qwen3-vl-8b", _TEXT, _flat("FP8", **_SCHEME)),
}


def files(case: Case) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and hf_quant_config.json of the case."""
    fields = published(case.model, "none")
    if case.block is not None:
        *outer, name = case.place.split(".")
        (fields[outer[0]] if outer else fields)[name] = case.block
    return fields, case.file
