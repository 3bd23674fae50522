"""Bytes of parameters on one rank, layer by layer, as the engine's `create_weights` allocates them.
Pure.

weights_bytes(built, rank) -> bytes on one rank; None: impossible split, or unknown scheme
linear_bytes(layer, rank) -> bytes of all layers of one kind; other_bytes(tensor, tp, dtype) ->
bytes of other parameters

Scales of whole tensors (a few bytes per matrix) are left out. Tensors that a kernel drops after
loading (below 1 %) are counted, since they exist while loading. Sources:
vllm/model_executor/layers/ of 0.18.0 to 0.33.0, named at each rule; checked by
tests/conformance/golden/weight-*.json.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import lru_cache

from gateway.domain import TensorGroup
from gateway.engines.common.layers.built_model import (
    BuiltModel,
    Linear,
    padded_vocab,
    parts,
    rank_shape,
)
from gateway.engines.common.quantization.block import UnknownScheme
from gateway.models.rank import Rank
from gateway.models.scheme import Scheme, round_up

# vLLM 0.33.0: GPTQ layers and packed experts keep no order of their inputs; GPTQ experts have
# biases even where the model has none (quantization/auto_gptq.py,
# compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16.py).
NO_GROUP_INDEX = "no_group_index"
# vLLM 0.33.0: TensorRT-LLM's MXFP4 experts grow to 128 instead of 256
# (fused_moe/oracle/mxfp4.py:871).
NARROW_EXPERT_TILES = "narrow_expert_tiles"
# vLLM 0.26.0 and 0.33.0: Marlin takes experts whose size is not a multiple of 64
# (allow_tile_padding of check_moe_marlin_supports_layer in quantization/utils/marlin_utils.py).
PADDED_EXPERTS = "padded_experts"
# vLLM 0.26.0: W4A8 experts have float32 scales a channel before they are loaded, elsewhere these
# come when groups' scales shrink (compressed_tensors_moe/compressed_tensors_moe_w4a8_fp8.py:147).
CHANNEL_SCALES = "channel_scales"
# vLLM 0.33.0: experts in FP8 blocks that a cut would split get finer blocks
# (fused_moe/oracle/fp8.py:292).
FINER_BLOCKS = "finer_blocks"
# vLLM 0.18.0 and 0.19.1: experts in MXFP4 that Triton computes have their scales a second time, in
# its order, and those of the checkpoint stay (fused_moe/oracle/mxfp4.py:747 of 0.19.1 deletes the
# weights alone; :1164 of 0.26.0 the scales too). gpt-oss-120b took 64.38 GiB of an H100 instead of
# 61 (github.com/vllm-project/vllm/issues/33155).
KEPT_SCALES = "kept_scales"
# Traits that change the size of weights as they are made. KEPT_SCALES comes after them.
TRAITS = frozenset(
    {NO_GROUP_INDEX, NARROW_EXPERT_TILES, PADDED_EXPERTS, CHANNEL_SCALES, FINER_BLOCKS}
)

# Where kernels give float32 products of 16-bit weights: fused_moe/router/gate_linear.py:38 of
# 0.18.0, :87 of 0.33.0.
_EXACT_KERNELS = ("9.0", "10.0", "10.3")

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_FLOATS = {"", "BF16", "F16", "F32", "F64"}
_STORED_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
}
# These are float32 in every dtype of the model: mamba_mixer.py, mamba_mixer2.py of layers/mamba/.
_DECAY = (
    ".mamba.A_log",
    ".mixer.A_log",
)
_FLOAT_SCALE = 4  # scales of FP8 and INT8 are float32
_BNB_BLOCK = (
    64  # weights that share a float32 (bitsandbytes' default, which checkpoints do not change)
)


def weights_bytes(
    built_model: BuiltModel,
    rank: Rank,
    traits: Collection[str] = (),
    padded_sizes: Mapping[Linear, tuple[int, int]] | None = None,
) -> int | None:
    """Bytes of all parameters on one rank; `linear_bytes` explains the arguments."""
    if padded_sizes:
        return _total_bytes(built_model, rank, traits, padded_sizes)
    return _shared_sum(built_model, rank.computing, frozenset(traits) & TRAITS)


@lru_cache(maxsize=256)
def _shared_sum(built_model: BuiltModel, rank: Rank, traits: frozenset[str]) -> int | None:
    """Engine versions and KV caches that make no difference to weights share the sum."""
    return _total_bytes(built_model, rank, traits, {})


def _total_bytes(
    built_model: BuiltModel,
    rank: Rank,
    traits: Collection[str],
    padded_sizes: Mapping[Linear, tuple[int, int]],
) -> int | None:
    """Bytes of all parameters on one rank; None: unknown."""
    attending = [
        group.kv_heads
        for group in built_model.attention
        if group.kv_heads and group.kind not in ("recurrent", "vision")
    ]
    kv_heads = min(attending, default=1)
    total = 0
    for tensor in built_model.other_tensors:
        total += other_bytes(
            tensor, rank.tp, rank.dtype, None if built_model.is_known else kv_heads
        )
    plain_bytes = linears_bytes(built_model, rank.computing, frozenset(traits) & TRAITS)
    for layer, size in zip(built_model.linears, plain_bytes, strict=True):
        grown_bytes = (
            linear_bytes(layer, rank, traits, padded_size)
            if padded_sizes and (padded_size := padded_sizes.get(layer))
            else size
        )
        if grown_bytes is None:
            return None
        total += grown_bytes
    return total


@lru_cache(maxsize=256)
def linears_bytes(
    built_model: BuiltModel, rank: Rank, traits: frozenset[str] = frozenset()
) -> tuple[int | None, ...]:
    """Bytes of each of the layers. rank: reduced to the fields that matter (`computing`)."""
    return tuple([linear_bytes(layer, rank, traits) for layer in built_model.linears])


def other_bytes(tensor: TensorGroup, tp: int, dtype: str, kv_heads: int | None = None) -> int:
    """Bytes of these parameters on one rank. The engine keeps the dtype of the tensor.

    kv_heads: the number of KV heads for a checkpoint's own tensor, whose floats the engine casts to
    `dtype`; ranks beyond the number of KV heads hold one head each.
    """
    cast = not tensor.dtype or (kv_heads and tensor.dtype in _FLOATS)
    item_bytes = _ITEM_BYTES[dtype] if cast else _STORED_ITEM_BYTES.get(tensor.dtype, 1)
    if kv_heads and tensor.name.endswith(_DECAY):
        item_bytes = 4
    elements = math.prod(tensor.shape)
    if tensor.shard == "vocab" and tensor.shape:
        elements = padded_vocab(tensor.shape[0]) // tp * math.prod(tensor.shape[1:])
    elif tensor.shard == "kv":
        elements //= min(tp, kv_heads or tp)
    elif tensor.shard in ("column", "expert_column") or (
        tensor.shard in ("row", "expert_row") and len(tensor.shape) >= 2
    ):
        elements //= tp
    return elements * item_bytes * tensor.count


def linear_bytes(
    layer: Linear,
    rank: Rank,
    traits: Collection[str] = (),
    padded_to: tuple[int, int] | None = None,
) -> int | None:
    """Bytes of all `layer.count` layers of this kind on one rank.

    Of whole experts the first rank holds the most (determine_expert_map in fused_moe/layer.py,
    expert_map_manager.py of 0.33.0). padded_to: (k, n) to which the kernel pads the layer; by
    default the size of gpt-oss's experts depends on the capability.
    """
    scheme = layer.scheme
    if isinstance(scheme, UnknownScheme):
        return None
    cut_sizes = rank_shape(layer, parts(layer, rank))
    if cut_sizes is None or indivisible_scale(layer, scheme, *cut_sizes, traits):
        return None
    k, n = padded_to or (
        _padded_sizes(layer, scheme, *cut_sizes, rank.capability, traits)
        if layer.experts
        else cut_sizes
    )
    is_narrow = not layer.is_exact or rank.capability in _EXACT_KERNELS
    matrix_bytes = _matrix_bytes(
        layer=layer,
        scheme=scheme,
        k=k,
        n=n,
        item_bytes=_ITEM_BYTES[rank.dtype if is_narrow else "float32"],
        traits=traits,
    )
    return (
        matrix_bytes
        * layer.count
        * (round_up(layer.experts, rank.ep) // rank.ep if layer.experts else 1)
    )


def kept_scale_bytes(built_model: BuiltModel, rank: Rank, names: Collection[str]) -> int:
    """Bytes of the scales that stay in addition to those in the kernel's order, for experts of
    these names."""
    total = 0
    for layer in built_model.linears:
        if layer.name not in names or not layer.experts or not isinstance(layer.scheme, Scheme):
            continue
        if layer.scheme.layout == "mxfp4" and (cut_sizes := rank_shape(layer, parts(layer, rank))):
            k, n = _padded_sizes(layer, layer.scheme, *cut_sizes, rank.capability, traits=())
            experts = round_up(layer.experts, rank.ep) // rank.ep
            total += k * n // layer.scheme.group * layer.count * experts
    return total


def spread_scale_bytes(built_model: BuiltModel, rank: Rank, names: Collection[str]) -> int:
    """Bytes that the scales of FP8 blocks grow by, for layers of these names, where Marlin computes
    them: one for each block becomes one for each group and column, in the dtype of activations.

    Source: vllm/model_executor/layers/quantization/utils/marlin_utils_fp8.py (0.26.0:190), and the
    same function in sglang/srt/layers/quantization/marlin_utils_fp8.py.
    """
    total = 0
    for layer in built_model.linears:
        if layer.name not in names or not isinstance(layer.scheme, Scheme):
            continue
        if layer.scheme.kind == "fp8_block" and (
            cut_sizes := rank_shape(layer, parts(layer, rank))
        ):
            k, n = cut_sizes
            group = max(1, layer.scheme.group)
            spread_bytes = -(-k // group) * (n * _ITEM_BYTES[rank.dtype] - -(-n // group) * 4)
            experts = round_up(layer.experts, rank.ep) // rank.ep if layer.experts else 1
            total += spread_bytes * layer.count * experts
    return total


def indivisible_scale(
    layer: Linear, scheme: Scheme, k: int, n: int, traits: Collection[str] = ()
) -> str:
    """The scale that two ranks would share, if create_weights rejects that; "": none."""
    group_size = scheme.group
    if scheme.kind in ("wna16", "w4a8", "mxfp8"):
        # GPTQ leaves it to the kernel to refuse the layer.
        is_free = layer.experts > 0 or group_size < 1 or scheme.act_order or scheme.layout == "gptq"
        return (
            f"K={k} is not a multiple of the group size {group_size}"
            if not is_free and k % group_size
            else ""
        )
    if scheme.kind != "fp8_block":
        return ""
    if layer.experts:
        own_size = _expert_sizes(layer, k, n)[1]
        block = _block(layer, scheme, k, n, traits)
        return (
            f"intermediate size {own_size} is not a multiple of the block size {block}"
            if own_size % block
            else ""
        )
    # validate_fp8_block_shape in quantization/utils/fp8_utils.py; merged layers are let through
    # (layers/linear.py, _maybe_allow_fp8_block_shape_mismatch).
    if k < layer.k and k % group_size:
        return f"K={k} is not a multiple of the block size {group_size}"
    is_single = n < layer.n and len(layer.parts) == 1
    return (
        f"N={n} is not a multiple of the block size {group_size}"
        if is_single and n % group_size
        else ""
    )


def _block(layer: Linear, scheme: Scheme, k: int, n: int, traits: Collection[str]) -> int:
    """Rows and columns of weights that share a scale."""
    if not layer.experts or FINER_BLOCKS not in traits:
        return scheme.group
    finer = math.gcd(scheme.group, *_expert_sizes(layer, k, n))
    return finer if finer >= 32 else scheme.group


def _matrix_bytes(
    layer: Linear, scheme: Scheme, k: int, n: int, item_bytes: int, traits: Collection[str]
) -> int:
    """Bytes of one matrix with all that belongs to it."""
    expert = layer.experts > 0
    kind = scheme.kind
    group_size = scheme.group
    if (
        expert
        and kind == "wna16"
        and scheme.layout
        and not _uses_marlin(layer, scheme, k, n, traits)
    ):
        return k * n * scheme.bits // 8 + _repacked_bytes(layer, scheme, k, n, item_bytes)
    matrix_bytes = n * item_bytes if _has_bias(layer, scheme, traits) else 0
    if kind == "unquantized":
        return matrix_bytes + k * n * item_bytes
    matrix_bytes += k * n * scheme.bits // 8
    if kind in ("wna16", "w4a8"):
        # Where the order of inputs is free, every rank holds the scales of all
        # (marlin_repeat_scales_on_all_ranks).
        rows_of_matrix = layer.k if scheme.act_order else k
        groups = rows_of_matrix // group_size if group_size > 0 else 1
        matrix_bytes += groups * n * item_bytes
        matrix_bytes += (
            n * _FLOAT_SCALE if expert and kind == "w4a8" and CHANNEL_SCALES in traits else 0
        )
        return (
            matrix_bytes
            + _zeros(scheme, groups * n, item_bytes, expert, traits)
            + _order_bytes(scheme, k, expert, traits)
        )
    if kind in ("fp8_token", "int8"):
        return matrix_bytes + n * _FLOAT_SCALE
    if kind == "fp8_block":
        block = _block(layer, scheme, k, n, traits)
        return (
            matrix_bytes
            + round_up(k, block) // block * (round_up(n, block) // block) * _FLOAT_SCALE
        )
    if kind == "bnb":
        return matrix_bytes + (k * n // _BNB_BLOCK if scheme.bits == 4 else n) * _FLOAT_SCALE
    return matrix_bytes + (k // group_size * n if group_size > 0 else 0)


def _uses_marlin(layer: Linear, scheme: Scheme, k: int, n: int, traits: Collection[str]) -> bool:
    """Whether Marlin computes these experts: check_moe_marlin_supports_layer in
    quantization/utils/marlin_utils.py."""
    if scheme.layout == "gptq" and not scheme.symmetric:
        return False  # quantization/gptq.py of 0.18.0 and 0.19.1; later ones refuse the checkpoint
    if scheme.layout == "awq" and scheme.symmetric and NO_GROUP_INDEX not in traits:
        # AutoRound packed as AWQ: quantization/inc.py, inc/schemes/inc_wna16_scheme.py of 0.26.0
        return False
    width, own_size = _expert_sizes(layer, k, n)
    multiple = max(1 if PADDED_EXPERTS in traits else 64, scheme.group)
    return width % 128 == 0 and own_size % multiple == 0 and scheme.group in (-1, 32, 64, 128)


def _repacked_bytes(layer: Linear, scheme: Scheme, k: int, n: int, item_bytes: int) -> int:
    """Bytes in addition to the weights of other experts, whose groups are halved until they fit:
    quantization/moe_wna16.py."""
    group_size = scheme.group
    while group_size > 1 and any(size % group_size for size in _expert_sizes(layer, k, n)):
        group_size //= 2
    scales = k // max(group_size, 1) * n
    return scales * item_bytes + (
        0 if scheme.symmetric or scheme.layout == "gptq" else scales * scheme.bits // 8
    )


def _expert_sizes(layer: Linear, k: int, n: int) -> tuple[int, int]:
    """The model's width, and one expert's."""
    return (k, n // len(layer.parts)) if layer.shard == "expert_column" else (n, k)


def _zeros(
    scheme: Scheme, scales: int, item_bytes: int, is_expert: bool, traits: Collection[str]
) -> int:
    """Bytes of zero points: GPTQ and AWQ have them even where they are all alike."""
    if not scheme.layout and scheme.symmetric:
        return 0
    if is_expert and scheme.layout == "gptq" and NO_GROUP_INDEX not in traits:
        # The engine makes as many numbers of the model's dtype as there should be packed ones:
        # quantization/gptq_marlin.py, w13_qzeros.
        return scales * scheme.bits // 32 * item_bytes
    return scales * scheme.bits // 8


def _order_bytes(scheme: Scheme, k: int, is_expert: bool, traits: Collection[str]) -> int:
    """Bytes of the order of the inputs (g_idx), of which experts keep two."""
    if NO_GROUP_INDEX in traits or scheme.layout == "awq" or scheme.kind == "w4a8":
        return 0
    if is_expert:
        return 8 * k
    return 4 * k if scheme.layout == "gptq" or scheme.act_order else 0


def _has_bias(layer: Linear, scheme: Scheme, traits: Collection[str]) -> bool:
    if layer.experts and scheme.layout == "gptq":
        return NO_GROUP_INDEX in traits
    if (
        layer.experts
        and scheme.kind not in ("unquantized", "fp8_tensor")
        and scheme.layout != "mxfp4"
    ):
        return False  # no other method for experts has them
    return layer.bias


def _padded_sizes(
    layer: Linear, scheme: Scheme, k: int, n: int, capability: str, traits: Collection[str]
) -> tuple[int, int]:
    """(k, n) of one expert, with the model's width and the expert's own at multiples that its
    kernel needs."""
    width, own_size = map(
        round_up, _expert_sizes(layer, k, n), _multiples(scheme, capability, traits)
    )
    return (
        (width, own_size * len(layer.parts))
        if layer.shard == "expert_column"
        else (own_size, width)
    )


def _multiples(scheme: Scheme, capability: str, traits: Collection[str]) -> tuple[int, int]:
    """The multiples to which the model's width and an expert's are padded. Source: the kernel that
    is chosen where none is asked for, in fused_moe/oracle/mxfp4.py (quantization/mxfp4.py of
    0.18.0): Triton on sm_90, TensorRT-LLM on sm_10x, else Marlin."""
    if scheme.layout != "mxfp4":
        return 1, 1
    family = capability.partition(".")[0]
    if family == "9":
        return 1, 64
    return 256, 256 if family == "10" and NARROW_EXPERT_TILES not in traits else 128
