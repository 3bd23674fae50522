"""SGLang's answer about a model on one rank: kernels, attention backends, bytes, pools, resolved
settings.

An answer has the fields of vllm/inside/answers.py. `kernels` name the multiplying function, and for
experts the runner. `needed` is for a pool of this many tokens, which its requests share. `fixed`
are bytes outside the pool.
"""

from __future__ import annotations

import collections
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...inside.meta import join_stages, write_folder
from . import layers as sglang_layers
from .attention import Backends, record_backends, select_backends
from .cache import cache
from .model import (
    EngineConfiguration,
    build_model,
    configure_engine,
    meta,
    parse_arguments,
    resolve_argument,
)

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def answer_question(files: Mapping[str, bytes], argv: Sequence[str]) -> dict[str, Any]:
    """The engine's answer for a model of these files with this command line. Raises the engine's
    errors.

    All pipeline stages are built.
    """
    record_backends()
    with write_folder(files) as folder:
        stages = []
        for stage in range(int(resolve_argument(parse_arguments(folder, argv), "pp_size"))):
            configuration = configure_engine(parse_arguments(folder, argv), stage)
            stages.append(answer(configuration))
    return join_stages(stages)


def answer(configuration: EngineConfiguration) -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")
    dtype = str(configuration.model.dtype).removeprefix("torch.")
    memory = int(torch.cuda.get_device_properties(0).total_memory)
    backends = select_backends(configuration.arguments, configuration.model)
    with meta(dtype):
        built_model = build_model(configuration)
        weights = sum(item.numel() * item.element_size() for item in built_model.parameters())
        attended = attention(built_model, configuration, backends)
        rows = kernels(built_model, dtype)
    return {
        "kernels": rows,
        "attention": attended,
        "weights": weights,
        "kv": cache(configuration, built_model, memory),
        "settled": resolve_settings(configuration, dtype),
    }


def resolve_settings(configuration: EngineConfiguration, dtype: str) -> dict[str, Any]:
    arguments = configuration.arguments
    model = configuration.model
    return {
        "architecture": model.hf_config.architectures[0],
        "dtype": dtype,
        "quantization": model.quantization or "",
        "kv_cache_dtype": resolve_argument(arguments, "kv_cache_dtype"),
        "max_model_len": model.context_len,
        "max_num_seqs": resolve_argument(arguments, "max_running_requests") or 0,
        "max_num_batched_tokens": resolve_argument(arguments, "chunked_prefill_size") or 0,
        "enforce_eager": bool(resolve_argument(arguments, "disable_cuda_graph")),
        "runner": "generate" if model.is_generation else "pooling",
        "static_fraction": resolve_argument(arguments, "mem_fraction_static"),
    }


# --- linear layers ---


def kernels(built_model: Any, dtype: str) -> list[dict[str, Any]]:
    """Kernel, inputs, outputs and number of experts on this rank of every linear layer; of experts
    the width of the model and of one expert.

    The weights are prepared here, so their bytes were counted before. Raises the engine's refusals.
    """
    base: Any = importlib.import_module("sglang.srt.layers.linear").LinearBase
    rows: collections.Counter[tuple[str, str, int, int, int]] = collections.Counter()
    kernel_names: dict[tuple[Any, ...], str] = {}
    for path, module in built_model.named_modules():
        name = _NUMBER.sub("*", path)
        if isinstance(module, base):
            n = int(getattr(module, "output_size_per_partition", None) or module.output_size)
            k = int(getattr(module, "input_size_per_partition", None) or module.input_size)
            scheme = getattr(module, "scheme", None)
            key = name, k, n, type(module.quant_method), type(scheme)
            if key not in kernel_names:
                kernel_names[key] = name_kernel(module, k, dtype)
            rows[name, kernel_names[key], k, n, 0] += 1
        elif hasattr(module, "moe_runner_config") and hasattr(module, "quant_method"):
            method, runner = sglang_layers.experts(module)
            partition = int(module.intermediate_size_per_partition)
            width = int(module.hidden_size)
            rows[name, runner or method or "", width, partition, int(module.num_local_experts)] += 1
    names = ("layer", "kernel", "k", "n", "experts")
    return [
        {**dict(zip(names, row, strict=True)), "count": count}
        for row, count in sorted(rows.items())
    ]


def name_kernel(layer: Any, inputs: int, dtype: str) -> str:
    """The product that a dense layer comes to; torch, where it is not quantized; the method, where
    only a stand-in stops it."""
    method = layer.quant_method
    name = type(method).__name__
    if name == "UnquantizedLinearMethod":
        return "torch"
    try:
        return sglang_layers.product(layer, inputs, dtype)
    except LookupError:
        return name
    except sglang_layers.REFUSALS as error:
        if sglang_layers.is_of_stand_in(error):
            return name
        raise


# --- attention ---


def _kind_of_heads(module: Any) -> str:
    """The kind of a layer of attention with heads of its own."""
    if "encoder" in str(getattr(module, "attn_type", "")).lower():
        return "encoder"
    return "sliding" if module.sliding_window_size > 0 else "full"


def attention(
    built_model: Any, configuration: EngineConfiguration, backends: Backends
) -> list[dict[str, Any]]:
    """The attention backends of a built model, counted by kind, size of a head and backend."""
    models: Any = importlib.import_module("sglang.srt.configs.model_config")
    paged: Any = importlib.import_module("sglang.srt.layers.radix_attention").RadixAttention
    towers: Any = importlib.import_module("sglang.srt.layers.attention.vision").QKV_BACKEND_IMPL
    is_latent = configuration.model.attention_arch == models.AttentionArch.MLA
    rank = (
        configuration.model.kv_lora_rank + configuration.model.qk_rope_head_dim if is_latent else 0
    )
    name = _join_names(backends.prefill, backends.decode)
    result: collections.Counter[tuple[str, int, str]] = collections.Counter()
    for module in built_model.modules():
        if isinstance(module, paged):
            if is_latent and module.qk_head_dim != rank:
                continue  # the same layer for a prefill, whose keys are not kept
            kind = "mla" if is_latent else _kind_of_heads(module)
            result[kind, int(module.qk_head_dim), name] += 1
        elif (tower := getattr(module, "qkv_backend", None)) is not None:
            head = getattr(module, "head_size", 0) or module.head_dim
            result[
                "vision",
                int(head),
                next(item for item, kind in towers.items() if type(tower) is kind),
            ] += 1
    if backends.recurrent is not None:
        states = backends.hybrid.mamba2_cache_params.layers
        stage = range(
            getattr(built_model, "start_layer", 0),
            getattr(built_model, "end_layer", configuration.model.num_hidden_layers),
        )
        result["recurrent", 0, _join_names(*backends.recurrent[1:])] += sum(
            layer in stage for layer in states
        )
    return [
        {
            "kind": kind,
            "head_dim": head,
            "backend": backend,
            "version": _version(backend),
            "layers": count,
        }
        for (kind, head, backend), count in sorted(result.items())
    ]


def _join_names(prefill: str, decode: str) -> str:
    return prefill if prefill == decode else f"{prefill}/{decode}"


def _version(backend: str) -> int:
    """The version of FlashAttention."""
    result = re.fullmatch(r"fa(\d)", backend)
    return int(result[1]) if result else 0
