"""Whole models, as vLLM itself builds them: kernel of every layer, backend of every attention layer, bytes on one rank, KV cache.

A question is (model, quantization, capability); only those of the capability that is booted are answered, the rest are null.
An answer has, for each of TENSOR_PARALLEL,

    layers     "NAME KERNEL KxN COUNT": sizes on one rank, where ranks differ one for each of them, divided by "|"; kernels too
    attention  "KIND HEAD_SIZE BACKEND [VERSION] COUNT" of its layers, joined by ", ", but those that read another
               layer's cache; with the version of FlashAttention
    weights    bytes of all parameters of one rank
    kv         "BYTES_OF_A_BLOCK: KIND TOKENS ...", with the tokens of a block in each of the cache's groups; "" without a cache

or null where the engine refuses, and `refused` says why, by the number of ranks.
"""

from __future__ import annotations

import collections
import enum
import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any

from tests.conformance.engine.model import built
from tests.conformance.kv_questions import _groups, _planner, _specs, prepare
from tests.conformance.layer_cases import TENSOR_PARALLEL
from tests.conformance.linear_questions import Question, _block_op
from tests.conformance.model_cases import OLDER_BEFORE, ONLINE, config, machines, pooling, triples
from tests.conformance.moe_questions import _humming
from tests.conformance.weight_questions import _pretend_bitsandbytes

__all__ = ["OLDER_BEFORE", "answers", "machines", "questions"]

_KV_BYTES = 8 << 30
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def questions(version: str) -> list[tuple[str, str, str]]:
    return triples(version)


def answers(version: str) -> list[dict[str, Any] | None]:
    prepare()
    _humming()
    _pretend_bitsandbytes()
    capability: Any = importlib.import_module("vllm.platforms").current_platform.get_device_capability()
    here = f"{capability.major}.{capability.minor}"
    return [_answer(model, quant) if asked == here else None for model, quant, asked in questions(version)]


def _answer(model: str, quant: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {"runner": "pooling"} if pooling(model) else {}
    arguments |= {"quantization": "fp8"} if quant == ONLINE else {}
    layers: dict[int, dict[str, tuple[str, int, int]]] = {}
    found: dict[str, Any] = {"layers": [], "attention": [], "weights": [], "kv": [], "refused": {}}
    for tp in TENSOR_PARALLEL:
        attention = weights = kv = None
        try:
            with built(config(model, quant), tp, **arguments) as (made, whole):
                layers[tp] = _layers(whole, made)
                attention = _attention(whole, made)
                weights = sum(one.numel() * one.element_size() for one in whole.parameters())
                kv = _kv(made)
        except Exception as error:  # an engine's refusal is an answer
            layers.pop(tp, None)
            attention = weights = kv = None
            found["refused"][str(tp)] = _said(error)
        found["attention"].append(attention)
        found["weights"].append(weights)
        found["kv"].append(kv)
    for name in ("attention", "kv"):  # mostly all ranks have the same
        told = {one for one in found[name] if one is not None}
        found[name] = found[name] if len(told) > 1 else min(told, default=None)
    found["layers"] = _rows(layers)
    return {name: value for name, value in found.items() if value}


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".split(" [type=")[0].removeprefix("ValidationError: 1 validation error for ")
    return " ".join(text.split())[:100]


def _rows(layers: dict[int, dict[str, tuple[str, int, int]]]) -> list[str]:
    rows: collections.Counter[str] = collections.Counter()
    for path in next(iter(layers.values()), {}):
        kernel, k, n = ("|".join(_alike(one)) for one in zip(*(ranks[path] for ranks in layers.values()), strict=True))
        rows[f"{_NUMBER.sub('*', path).removesuffix('.routed_experts')} {kernel} {k}x{n}"] += 1
    return [f"{row} {count}" for row, count in sorted(rows.items())]


def _alike(values: Iterable[Any]) -> list[str]:
    """One where all are alike."""
    told = [str(value) for value in values]
    return told[:1] if len(set(told)) == 1 else told


def _layers(whole: Any, made: Any) -> dict[str, tuple[str, int, int]]:
    """Kernel, inputs and outputs on this rank of every linear layer; of experts the model's width and one expert's."""
    base: Any = importlib.import_module("vllm.model_executor.layers.linear").LinearBase
    found = {}
    for path, module in whole.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, base):
            n = getattr(module, "output_size_per_partition", None) or module.output_size
            k = getattr(module, "input_size_per_partition", None) or module.input_size
            found[path] = (_kernel(getattr(module, "scheme", None) or method, k, n, made), k, n)
        elif "moe" in type(method).__name__.lower():
            given = module.moe_config
            own = getattr(given, "intermediate_size_per_partition_unpadded", None) or given.intermediate_size_per_partition
            width = getattr(given, "hidden_dim_unpadded", None) or given.hidden_dim
            backends = [
                value.name for name, value in vars(method).items() if "backend" in name and isinstance(value, enum.Enum)
            ]
            found[path] = (backends[0] if backends else type(method).__name__, width, own)
    return found


def _kernel(method: Any, k: int, n: int, made: Any) -> str:
    """What computes the layer: a kernel object, a backend, or the method itself; torch, where it is not quantized."""
    scheme = getattr(method, "scheme", None)  # of INCLinearMethod
    inner = getattr(scheme, "linear_method", None) or getattr(scheme, "inner_method", None)
    for owner in (method, inner):
        held = vars(owner) if owner is not None else {}
        if held.get("use_marlin") and "Marlin" not in type(held.get("fp8_linear")).__name__:
            return "Marlin"  # whatever kernel it made besides
        if type(held.get("w8a8_block_fp8_linear")).__name__.endswith("LinearOp"):  # it chooses when it runs
            dtype = str(made.model_config.dtype).removeprefix("torch.")
            return _block_op(Question("fp8_block", 8, 128, True, False, False, False, dtype, k, n, k))
        for name in ("kernel", "linear_kernel", "w8a8_block_fp8_linear", "fp8_linear"):
            if name in held and not isinstance(held[name], type):
                return type(held[name]).__name__
        if isinstance(held.get("backend"), enum.Enum):
            return str(held["backend"].value)
    name = type(inner or method).__name__
    return "torch" if name == "UnquantizedLinearMethod" else name


def _attention(whole: Any, made: Any) -> str:
    found: collections.Counter[tuple[str, int, str, str]] = collections.Counter()
    for layer in made.compilation_config.static_forward_context.values():
        name = type(layer).__name__
        if (
            not hasattr(layer, "get_attn_backend")
            or name.endswith("Cache")
            or getattr(layer, "kv_sharing_target_layer_name", None)
        ):
            continue
        backend = layer.get_attn_backend()
        version = getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None)
        if hasattr(layer, "mamba_type"):
            found["recurrent", 0, backend.get_name(), ""] += 1
        else:
            encoder = "encoder_only" in str(getattr(layer, "attn_type", "")).lower()
            kind = (
                "mla"
                if "MLA" in name + backend.get_name()
                else "encoder"
                if encoder
                else "sliding"
                if layer.sliding_window
                else "full"
            )
            named = str(version or "") if "FLASH_ATTN" in backend.get_name() and kind != "mla" else ""
            found[kind, layer.head_size, backend.get_name(), named] += 1
    for module in whole.modules():
        if type(module).__name__ in ("MMEncoderAttention", "MultiHeadAttention"):
            found["vision", module.head_size, module.attn_backend.name, ""] += 1
    return ", ".join(" ".join([*(str(word) for word in row if word != ""), str(count)]) for row, count in sorted(found.items()))


def _kv(made: Any) -> str:
    specs = _specs(made)
    if not specs:
        return ""
    planner = _planner()
    groups = _groups(planner, made, specs)
    made.model_config.max_model_len = 16
    arguments = [made, [specs], [_KV_BYTES]]
    if "global_kv_cache_groups" in inspect.signature(planner.get_kv_cache_configs).parameters:
        arguments.append(groups)
    planned = planner.get_kv_cache_configs(*arguments)[0]
    one = groups[0]
    mixed = type(one.kv_cache_spec).__name__ == "UniformTypeKVCacheSpecs"  # whose page is that of all its layers
    size = one.kv_cache_spec.page_size_bytes * (1 if mixed else max(len(group.layer_names) for group in groups))
    if planned.num_blocks != _KV_BYTES // size:
        raise RuntimeError(f"a block is not {size} bytes: {planned.num_blocks} are in {_KV_BYTES}")
    kinds = collections.Counter((type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size) for group in groups)
    told = " ".join(f"{count}*{kind.removesuffix('Spec')}/{block}" for (kind, block), count in sorted(kinds.items()))
    return f"{size}: {told}"
