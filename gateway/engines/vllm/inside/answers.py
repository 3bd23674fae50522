"""vLLM's answer about a model on one rank: kernels, attention backends, bytes, KV cache, resolved
settings.

An answer:

    kernels     [{layer, kernel, k, n, experts, count}]: sizes on this rank; `layer` has `*` for
                numbers; experts: 0 for a dense layer
    attention   [{kind, head_dim, backend, version, block, layers}], but layers that read another
                layer's cache
    weights     bytes of all parameters of this rank
    kv          {block_bytes, aside, needed: [[tokens, bytes]], state_bytes}: bytes of a block of
                the pool, and of one request of this many tokens; blocks that a start sets aside;
                bytes that a request's state takes at least; null without a cache
    settled     dtype, quantization, KV cache dtype, context and batch as the engine resolved them
"""

from __future__ import annotations

import collections
import enum
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...inside.meta import join_stages, write_folder
from .model import build_on_meta, parse_engine_arguments, prepare

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# Blocks of a request, dense enough that a straight line between two of them is the engine's own
# count but for windows.
_BLOCKS = sorted({round(2 ** (step / 4)) for step in range(4 * 20)})
_VISION = {"MMEncoderAttention", "MultiHeadAttention"}


class _GemmType(enum.Enum):
    """Kinds of products by the names of the package humming, which selection compares."""

    INDEXED = "indexed"
    GROUPED_CONTIGUOUS = "grouped_contiguous"
    GROUPED_MASKED = "grouped_masked"


def stand_in_for_packages() -> None:
    """Values of stand-in packages that selection compares: see `stubs`."""
    for name in (
        "humming.schema",
        "vllm.utils.humming",
        "vllm.model_executor.layers.fused_moe.experts.fused_humming_moe",
    ):
        with suppress(ImportError):
            module = importlib.import_module(name)
            for type_name in ("GemmType", "HummingGemmType"):
                if hasattr(module, type_name):
                    setattr(module, type_name, _GemmType)


def pretend_bitsandbytes() -> None:
    """The package is asked for its version and for the class of 8-bit weights, no more, until a
    model computes."""
    package = types.ModuleType("bitsandbytes")
    nn = types.ModuleType("bitsandbytes.nn")
    parameter: Any = importlib.import_module("torch").nn.Parameter
    nn.__dict__["Int8Params"] = lambda data, **_: parameter(data, requires_grad=False)
    package.__dict__.update(__version__="99.0.0", nn=nn)
    sys.modules.update({"bitsandbytes": package, "bitsandbytes.nn": nn})


# --- one model ---


def answer(engine_config: Any, built_model: Any) -> dict[str, Any]:
    """The answer about a VllmConfig and its model, as `build_on_meta` gives them."""
    dtype = str(engine_config.model_config.dtype).removeprefix("torch.")
    rows: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for path, (kernel, k, n, experts) in kernels(built_model, dtype).items():
        rows[_NUMBER.sub("*", path).removesuffix(".routed_experts"), kernel, k, n, experts] += 1
    names = ("layer", "kernel", "k", "n", "experts")
    return {
        "kernels": [
            {**dict(zip(names, row, strict=True)), "count": count}
            for row, count in sorted(rows.items())
        ],
        "attention": attention(built_model, engine_config),
        "weights": sum(item.numel() * item.element_size() for item in built_model.parameters()),
        "kv": cache(engine_config),
        "settled": {
            "architecture": engine_config.model_config.architecture,
            "dtype": dtype,
            "quantization": engine_config.model_config.quantization or "",
            "kv_cache_dtype": str(engine_config.cache_config.cache_dtype),
            "max_model_len": engine_config.model_config.max_model_len,
            "max_num_seqs": engine_config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": engine_config.scheduler_config.max_num_batched_tokens,
            "enforce_eager": bool(engine_config.model_config.enforce_eager),
            "runner": str(engine_config.model_config.runner_type),
        },
    }


def kernels(built_model: Any, dtype: str) -> dict[str, tuple[str, int, int, int]]:
    """Kernel, inputs, outputs and number of experts on this rank of every linear layer; of experts
    the model's width and one
    expert's."""
    base: Any = importlib.import_module("vllm.model_executor.layers.linear").LinearBase
    result = {}
    for path, module in built_model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, base):
            n = getattr(module, "output_size_per_partition", None) or module.output_size
            k = getattr(module, "input_size_per_partition", None) or module.input_size
            result[path] = (
                name_kernel(getattr(module, "scheme", None) or method, k, n, dtype),
                k,
                n,
                0,
            )
        elif "moe" in type(method).__name__.lower():
            moe_config = module.moe_config
            own_sizes = (
                getattr(moe_config, "intermediate_size_per_partition_unpadded", None)
                or moe_config.intermediate_size_per_partition
            )
            width = getattr(moe_config, "hidden_dim_unpadded", None) or moe_config.hidden_dim
            backends = [
                value.name
                for name, value in vars(method).items()
                if "backend" in name and isinstance(value, enum.Enum)
            ]
            experts: Any = getattr(moe_config, "num_local_experts", None) or getattr(
                moe_config, "num_experts", 0
            )
            result[path] = (
                backends[0] if backends else type(method).__name__,
                width,
                own_sizes,
                int(experts),
            )
    return result


def name_kernel(method: Any, k: int, n: int, dtype: str) -> str:
    """The computing object of the layer: a kernel, a backend, or the method itself; torch for an
    unquantized one."""
    scheme = getattr(method, "scheme", None)  # of INCLinearMethod
    inner_method = getattr(scheme, "linear_method", None) or getattr(scheme, "inner_method", None)
    for owner in (method, inner_method):
        attributes = vars(owner) if owner is not None else {}
        if (
            attributes.get("use_marlin")
            and "Marlin" not in type(attributes.get("fp8_linear")).__name__
        ):
            return "Marlin"  # for every other kernel that it made
        if type(attributes.get("w8a8_block_fp8_linear")).__name__.endswith("LinearOp"):
            return block_fp8(k, n, dtype)
        for name in ("kernel", "linear_kernel", "w8a8_block_fp8_linear", "fp8_linear"):
            if name in attributes and not isinstance(attributes[name], type):
                return type(attributes[name]).__name__
        if isinstance(attributes.get("backend"), enum.Enum):
            return str(attributes["backend"].value)
    name = type(inner_method or method).__name__
    return "torch" if name == "UnquantizedLinearMethod" else name


def block_fp8(k: int, n: int, dtype: str) -> str:
    """Up to 0.19.1 block-scaled layers choose at run time: which of the op's bodies is entered."""
    torch: Any = importlib.import_module("torch")
    quantization = "vllm.model_executor.layers.quantization.utils"
    shape: Any = importlib.import_module(f"{quantization}.quant_utils").GroupShape
    op = importlib.import_module(f"{quantization}.fp8_utils").W8A8BlockFp8LinearOp(
        shape(128, 128), shape(1, 128)
    )
    entered: list[str] = []

    def body(name: str) -> Callable[..., Any]:
        def run(x: Any, *_: Any) -> Any:
            entered.append(name)
            return x.new_empty(1, n)

        return run

    op.w8a8_blockscale_op = body(op.w8a8_blockscale_op.__name__)
    op._run_flashinfer, op._run_deepgemm = body("_run_flashinfer"), body("_run_deepgemm")
    weight = torch.empty(n, k, dtype=torch.float8_e4m3fn, device="meta")
    op.apply(torch.empty(1, k, dtype=getattr(torch, dtype), device="meta"), weight, weight)
    return f"W8A8BlockFp8LinearOp.{entered[0]}"


def _kind_of_heads(layer: Any, name: str, role: str) -> str:
    """The kind of a layer of attention with heads of its own. role: its type, in small letters."""
    if "encoder_only" in role:
        return "encoder"
    if "encoder_decoder" in role:
        return "cross"
    has_window = getattr(layer, "sliding_window", None) or name == "ChunkedLocalAttention"
    return "sliding" if has_window else "full"


def attention(built_model: Any, engine_config: Any) -> list[dict[str, Any]]:
    """The attention backends of a built model, counted by kind, size of a head and backend."""
    result: collections.Counter[tuple[str, int, str, int]] = collections.Counter()
    for layer in engine_config.compilation_config.static_forward_context.values():
        name = type(layer).__name__
        if (
            not hasattr(layer, "get_attn_backend")
            or name.endswith("Cache")
            or getattr(layer, "kv_sharing_target_layer_name", None)
        ):
            continue
        backend = layer.get_attn_backend().get_name()
        if hasattr(layer, "mamba_type"):
            result["recurrent", 0, backend, 0] += 1
            continue
        role = str(getattr(layer, "attn_type", "")).lower()
        is_latent = "MLA" in name + backend
        kind = "mla" if is_latent else _kind_of_heads(layer, name, role)
        version = getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None)
        # DeepSeek V4's own attention has `head_dim`.
        size: Any = getattr(layer, "head_size", None) or getattr(layer, "head_dim", 0)
        result[
            kind, size, backend, version or 0 if "FLASH_ATTN" in backend and not is_latent else 0
        ] += 1
    for module in built_model.modules():
        if not _VISION.isdisjoint(base.__name__ for base in type(module).__mro__):
            result["vision", module.head_size, module.attn_backend.name, 0] += 1
    names = ("kind", "head_dim", "backend", "version")
    return [
        {**dict(zip(names, row, strict=True)), "layers": count}
        for row, count in sorted(result.items())
    ]


# --- the KV cache ---


def planner() -> Any:
    with suppress(ModuleNotFoundError):
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    return importlib.import_module("vllm.v1.core.kv_cache_utils")


def specs(engine_config: Any) -> dict[str, Any]:
    """The KV cache specs of all layers, once the engine has settled the block size, as its workers
    do after loading."""
    importlib.import_module("vllm.platforms").current_platform.update_block_size_for_backend(
        engine_config
    )
    layers = engine_config.compilation_config.static_forward_context
    result = {
        name: layer.get_kv_cache_spec(engine_config)
        for name, layer in layers.items()
        if hasattr(layer, "get_kv_cache_spec")
    }
    # A layer that reads another layer's cache keeps none (Attention.kv_sharing_target_layer_name,
    # the runner's get_kv_cache_spec).
    shares = {
        name
        for name, layer in layers.items()
        if getattr(layer, "kv_sharing_target_layer_name", None)
    }
    return {
        name: _customize_spec(layers[name], spec)
        for name, spec in result.items()
        if spec is not None and name not in shares
    }


def _customize_spec(layer: Any, spec: Any) -> Any:
    """The spec with the bytes of the layer's backend other than keys and values, such as scales.
    Versions before 0.33.0 count them in the spec itself (get_kv_cache_spec in
    vllm/v1/worker/gpu/attn_utils.py)."""
    interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")
    utils: Any = importlib.import_module("vllm.v1.worker.utils")
    if not isinstance(spec, interface.AttentionSpec) or not hasattr(
        utils, "customize_attention_spec"
    ):
        return spec
    return utils.customize_attention_spec(layer.get_attn_backend(), spec)


def group_caches(plans: Any, engine_config: Any, specs: dict[str, Any]) -> Any:
    """The groups into which `plans`, the engine's own planner, puts the layers' specs."""
    managers: Any = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
    if hasattr(managers, "register_all_kvcache_specs"):
        managers.register_all_kvcache_specs(engine_config)
    utils: Any = importlib.import_module("vllm.v1.attention.backends.utils")
    if hasattr(utils, "resolve_kv_cache_layout"):
        transfer: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.utils")
        layouts = utils.get_supported_kv_cache_layouts(
            transfer.get_current_attn_backends(engine_config)
        )
        utils.resolve_kv_cache_layout(
            engine_config, [[layout.name for layout in layouts]], list(specs.values())
        )
    if hasattr(plans, "get_global_kv_cache_groups"):
        return plans.get_global_kv_cache_groups(engine_config, [specs])
    return plans.get_kv_cache_groups(engine_config, dict(specs))


def cache(engine_config: Any) -> dict[str, Any] | None:
    """Bytes of a block over all layers that share it, and of one request of some lengths, up to the
    model's own."""
    cache_specs = specs(engine_config)
    if not cache_specs:
        return None
    plans = planner()
    groups = group_caches(plans, engine_config, cache_specs)
    longest_context = engine_config.model_config.max_model_len
    # Whole blocks of the group with the longest ones: between them nothing grows. A state's block
    # may be a whole request.
    kinds = [
        (type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size) for group in groups
    ]
    block = max((size for kind, size in kinds if "Mamba" not in kind), default=1)
    lengths = sorted(
        {1, longest_context}
        | {blocks * block for blocks in _BLOCKS if blocks * block < longest_context}
    )
    bytes_by_length = [
        (length, bytes_needed(plans, engine_config, groups, length)) for length in lengths
    ]
    blocks_aside = set_aside(
        plans, engine_config, cache_specs, groups, *bytes_by_length[len(bytes_by_length) // 2]
    )
    engine_config.model_config.max_model_len = longest_context
    # resolve_cudagraph_mode_and_sizes wants a block for each request (vllm/config/compilation.py).
    states = any("Mamba" in kind for kind, _ in kinds)
    return {
        "block_bytes": block_bytes(groups),
        "aside": blocks_aside,
        "needed": bytes_by_length,
        "state_bytes": block_bytes(groups) if states else 0,
    }


def set_aside(
    plans: Any,
    engine_config: Any,
    specs: dict[str, Any],
    groups: Any,
    length: int,
    bytes_needed: int,
) -> int:
    """Blocks that must be free in addition to those of a request, or the engine refuses to start:
    found by trying."""
    engine_config.model_config.max_model_len = length
    for blocks in range(4):
        try:
            plan_cache(
                plans, engine_config, specs, groups, bytes_needed + blocks * block_bytes(groups)
            )
        except ValueError:
            continue
        return blocks
    return 4


def plan_cache(
    plans: Any, engine_config: Any, specs: dict[str, Any], groups: Any, memory: int
) -> Any:
    """The cache that the engine's own planner makes of this many bytes. Raises ValueError where the
    longest request does not fit."""
    arguments = [engine_config, [specs], [memory]]
    if "global_kv_cache_groups" in inspect.signature(plans.get_kv_cache_configs).parameters:
        arguments.append(groups)
    return plans.get_kv_cache_configs(*arguments)[0]


def block_bytes(groups: Any) -> int:
    """Bytes of one block of the pool: a page in every layer of a group."""
    first_group = groups[0]
    # The page of such a group is that of all its layers.
    is_mixed = type(first_group.kv_cache_spec).__name__ == "UniformTypeKVCacheSpecs"
    layers = 1 if is_mixed else max(len(group.layer_names) for group in groups)
    return int(first_group.kv_cache_spec.page_size_bytes * layers)


def bytes_needed(plans: Any, engine_config: Any, groups: Any, length: int) -> int:
    """Bytes of one request of this length, as the engine's own planner counts them."""
    engine_config.model_config.max_model_len = length
    arguments = [engine_config, groups]
    if "builder" in inspect.signature(plans._max_memory_usage_bytes_from_groups).parameters:
        builder: Any = importlib.import_module("vllm.v1.core.kv_cache_config_builder")
        arguments.insert(0, builder.get_kv_cache_config_builder(engine_config))
    needed_bytes: int = plans._max_memory_usage_bytes_from_groups(*arguments)
    return needed_bytes


def answer_question(files: Mapping[str, bytes], argv: Sequence[str]) -> dict[str, Any]:
    """`answer` for a model of these files with this command line. Raises the engine's errors.

    All pipeline stages are built: kernels and backends are those of all, bytes those of the
    largest.
    """
    prepare()
    with write_folder(files) as folder:
        stages = []
        for stage in range(parse_engine_arguments(folder, argv).pipeline_parallel_size):
            with build_on_meta(parse_engine_arguments(folder, argv), stage) as (
                engine_config,
                built_model,
            ):
                stages.append(answer(engine_config, built_model))
    return join_stages(stages)
