"""The quantization block that a checkpoint has in its config.json, for a question about experts."""

from __future__ import annotations

from typing import Any


def block(q: Any) -> dict[str, Any] | None:
    """The quantization_config of a checkpoint like this."""
    if q.origin == "gptq":
        return {"quant_method": "gptq", "bits": q.bits, "group_size": q.group, "sym": q.symmetric,
            "desc_act": q.act_order,
                "lm_head": False, "modules_in_block_to_quantize": ["mlp.experts"]}  # fmt: skip
    if q.origin == "awq":
        return {"quant_method": "awq", "bits": q.bits, "group_size": q.group,
            "zero_point": not q.symmetric, "version": "gemm",
                "modules_to_not_convert": ["lm_head"]}  # fmt: skip
    if q.origin == "auto-round":
        return {"quant_method": "auto-round", "bits": q.bits, "group_size": q.group,
            "sym": q.symmetric, "data_type": "int",
                "packing_format": "auto_round:auto_gptq"}  # fmt: skip
    if q.origin == "compressed-tensors":
        return _compress(q)
    if q.origin == "fp8":
        block_fields = {"weight_block_size": [q.group, q.group]} if q.kind == "fp8_block" else {}
        return {
            "quant_method": "fp8",
            "activation_scheme": "static" if q.static else "dynamic",
            **block_fields,
        }
    if q.origin == "modelopt":
        algorithms = {
            "fp8_tensor": "FP8",
            "nvfp4": "NVFP4",
            "mxfp8": "MXFP8",
            "fp8_token": "FP8_PER_CHANNEL_PER_TOKEN",
            "fp8_block": "FP8_PB_WO",
        }
        algorithm = algorithms[q.kind]
        algorithm = "W4A16_NVFP4" if q.kind == "nvfp4" and q.weight_only else algorithm
        return {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": q.group,
            "ignore": [],
                "quantization": {"quant_algo": algorithm, "group_size": q.group,
                    "kv_cache_quant_algo": None,
                                 "exclude_modules": []}}  # fmt: skip
    return {"quant_method": "mxfp4"} if q.origin == "mxfp4" else None


def _compress(q: Any) -> dict[str, Any]:
    integer = q.kind in ("wna16", "int8", "w4a8")
    strategy = {
        "fp8_tensor": "tensor",
        "fp8_token": "channel",
        "fp8_block": "block",
        "int8": "channel",
        "nvfp4": "tensor_group",
    }
    weights: dict[str, Any] = {
        "num_bits": q.bits, "type": "int" if integer else "float", "symmetric": q.symmetric,
        "dynamic": False,
        "strategy": strategy.get(q.kind) or ("group" if q.group > 0 else "channel"),
        "group_size": q.group if q.group > 0 else None,
        "actorder": "group" if q.act_order else None,
    }  # fmt: skip
    acts: dict[str, Any] | None = {"num_bits": 8, "type": "int" if q.kind == "int8" else "float",
        "symmetric": True,
                                   "dynamic": not q.static, "strategy": "token"}  # fmt: skip
    if q.kind == "fp8_block":
        weights |= {"block_structure": [q.group, q.group], "group_size": None}
        acts = {**(acts or {}), "strategy": "group", "group_size": 128}
    if q.kind == "fp8_tensor" or (q.kind == "int8" and q.static):
        acts = {**(acts or {}), "strategy": "tensor"}
    if q.kind in ("nvfp4", "mxfp4"):
        local = (
            {"strategy": "tensor_group", "dynamic": "local"}
            if q.kind == "nvfp4"
            else {"strategy": "group", "dynamic": True}
        )
        acts = {**(acts or {}), "num_bits": 4, "group_size": q.group, **local}
    if q.kind == "mxfp8":
        weights["scale_dtype"] = "torch.uint8"
        acts = {**(acts or {}), "strategy": "group", "group_size": 32}
    if q.kind == "wna16" or q.weight_only:
        acts = None
    form = {"wna16": "pack-quantized", "int8": "int-quantized", "w4a8": "pack-quantized",
        "nvfp4": "nvfp4-pack-quantized",
            "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}.get(q.kind,
            "float-quantized")  # fmt: skip
    group = {
        "weights": weights,
        "input_activations": acts,
        "output_activations": None,
        "targets": ["Linear"],
        "format": form,
    }
    return {"quant_method": "compressed-tensors", "format": form,
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
            "quantization_status": "compressed", "global_compression_ratio": None,
            "kv_cache_scheme": None}  # fmt: skip
