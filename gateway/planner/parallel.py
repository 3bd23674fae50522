"""Tensor parallel sizes that a model allows, and groups of GPUs. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from gateway.domain import AttentionGroup, Gpu, Hardware, ModelSpec, TensorGroup
from gateway.engines.common.layers.built_model import (
    BuiltModel,
    is_in_tower,
    padded_vocab,
    rank_shape,
)
from gateway.engines.common.planning_input import PlanningInput, available_bytes, free_bytes_of

# Groups are compared one by one, and 12 GPUs have at most 924 of one size.
_MAX_GPUS = 12

_GpuKind = tuple[str, str | None, int | None]
"""Name, compute capability and bytes of memory of GPUs that count as alike."""


def parallel_refusal(
    spec: ModelSpec, built_model: BuiltModel, tp: int, *, ep: bool = False, dp: int = 1
) -> tuple[str, str | None] | None:
    """Why `tp` ranks cannot share this model, and which layer stands against it; None when they
    can.

    dp: the number of ranks in a group, over all of which experts are cut.
    """
    if tp * dp == 1:
        return None
    refusal = _heads_refusal(built_model, tp) or _vocab_refusal(spec, tp)
    if refusal:
        return refusal, None
    for layer in built_model.linears:
        parts = tp * dp if layer.experts else tp
        if (
            rank_shape(layer, parts) is None
            and not (ep and layer.experts)
            and not built_model.guessed
        ):
            return (
                f"{layer.name} ({layer.k} inputs, {layer.n} outputs) cannot be cut for {parts}"
                " GPUs",
                layer.name,
            )
    if built_model.is_known:
        return None
    refusals = ((_tensor_refusal(spec, tensor, tp), tensor) for tensor in built_model.other_tensors)
    return next(((refusal, tensor.name) for refusal, tensor in refusals if refusal), None)


def _heads_refusal(built_model: BuiltModel, tp: int) -> str:
    """Why `tp` ranks cannot share the attention heads; "": they can."""
    for group in built_model.attention:
        if group.kind in ("vision", "recurrent"):
            continue
        if group.heads % tp:
            return f"{group.heads} attention heads cannot be shared by {tp} GPUs"
        if group.kind != "mla" and group.kv_heads % tp and tp % group.kv_heads:
            return f"{group.kv_heads} KV heads can be neither split over nor repeated on {tp} GPUs"
    return ""


def _vocab_refusal(spec: ModelSpec, tp: int) -> str:
    """Why `tp` ranks cannot share the vocabulary; "": they can."""
    vocab = padded_vocab(spec.vocab)
    if vocab % tp == 0:
        return ""
    return f"the vocabulary ({vocab} rows with padding) cannot be split over {tp} GPUs"


def _tensor_refusal(spec: ModelSpec, tensor: TensorGroup, tp: int) -> str:
    """Why `tp` ranks cannot share a tensor of a model whose class is unknown; "": they can."""
    fused = len(tensor.shape) == 3 and tensor.shard.startswith("expert")
    if fused and spec.experts and spec.experts.intermediate % tp:
        return f"experts of size {spec.experts.intermediate} cannot be split over {tp} GPUs"
    rows, columns = tensor.shape if len(tensor.shape) == 2 else (0, 0)
    if tensor.shard in ("column", "expert_column") and rows % tp:
        return f"{tensor.name} has {rows} rows, which {tp} GPUs cannot split"
    if tensor.shard in ("row", "expert_row") and columns % tp:
        return f"{tensor.name} has {columns} columns, which {tp} GPUs cannot split"
    return ""


def tower_heads(built_model: BuiltModel, tp: int) -> int:
    """The heads of a vision tower that `tp` ranks cannot share; 0: they can."""
    return next(
        (
            group.heads
            for group in built_model.attention
            if group.kind == "vision" and group.heads % tp
        ),
        0,
    )


def tower_refusal(built_model: BuiltModel, tp: int) -> str:
    """Why `tp` ranks cannot share the vision tower; "": they can.

    A tower that only config.json describes is cut by its heads, one with known layers where a cut
    of a layer fails.
    """
    heads = tower_heads(built_model, tp)
    is_cut = any("vision" in part for part in built_model.guessed) or any(
        is_in_tower(layer.name) and rank_shape(layer, tp) is None for layer in built_model.linears
    )
    if not heads or not is_cut:
        return ""
    return f"the {heads} heads of its vision tower cannot be shared by {tp} GPUs"


def sufficient_ranks(attention: Iterable[AttentionGroup], ranks: int) -> int:
    """The ranks of tensor parallelism beyond which some of `ranks` would keep the same KV cache.

    One for latents, else the number of KV heads.
    """
    kv_heads = [
        1 if group.kind == "mla" else group.kv_heads
        for group in attention
        if group.kind in ("full", "sliding", "mla")
    ]
    max_ranks = min(kv_heads, default=ranks)
    return max(
        size for size in range(1, ranks + 1) if ranks % size == 0 and size <= max(1, max_ranks)
    )


def _candidate_groups(
    gpu_indexes: Sequence[int],
    size: int,
    free_bytes: Mapping[int, int],
    nvlinks: Mapping[tuple[int, int], int],
) -> Iterable[tuple[int, ...]]:
    """The groups of this many GPUs that may be the best: where all are linked alike, only those
    with the most room."""
    freest_indexes = sorted(gpu_indexes, key=lambda index: (-free_bytes[index], index))[
        : max(_MAX_GPUS, size)
    ]
    if len(freest_indexes) < size or (
        size > 1 and len(set(map(nvlinks.__getitem__, combinations(freest_indexes, 2)))) > 1
    ):
        return combinations(freest_indexes, size)
    least_free_bytes = free_bytes[freest_indexes[size - 1]]
    roomy_indexes = sorted(
        index for index in freest_indexes if free_bytes[index] >= least_free_bytes
    )
    return [tuple(roomy_indexes[:size])]


def drop_engines(machine: Hardware, held_bytes: Mapping[str, int]) -> Hardware:
    """The machine as it would be without the engines that hold this many bytes of its GPUs, by
    UUID."""

    def add_held_bytes(gpu: Gpu) -> Gpu:
        if gpu.free_bytes is None or gpu.uuid not in held_bytes:
            return gpu
        total = gpu.free_bytes + held_bytes[gpu.uuid]
        # More than the GPU has: the engines have not taken all of it yet. The memory that is not
        # free includes that of the driver and of other programs.
        return gpu.evolve(
            free_bytes=(
                total
                if total <= (gpu.total_bytes or 0)
                else max(gpu.free_bytes, held_bytes[gpu.uuid])
            )
        )

    return machine.evolve(gpus=tuple(map(add_held_bytes, machine.gpus))) if held_bytes else machine


def free_bytes_by_gpu(hardware: Hardware, promised_bytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes that a new engine may take of each GPU, by UUID."""
    return {gpu.uuid: free_bytes_of(gpu, promised_bytes) for gpu in hardware.gpus}


def _gpu_kind(gpu: Gpu) -> _GpuKind:
    return gpu.name, gpu.capability, gpu.total_bytes


def spare_groups(inputs: PlanningInput, size: int, budget_bytes: int) -> int:
    """How many groups of `size` alike GPUs have this much room on each."""
    counts = Counter(
        _gpu_kind(gpu) for gpu in inputs.hardware.gpus if inputs.available[gpu.uuid] >= budget_bytes
    )
    return sum(count // size for count in counts.values()) if size else 0


def layers_per_stage(
    layers: int, shares: Sequence[float], max_layers: Sequence[float]
) -> tuple[int, ...] | None:
    """The number of layers of each stage: by `shares`, and no more than its `max_layers`. None: the
    stages do not hold all layers."""
    layer_counts = [1] * len(shares)
    for _ in range(layers - len(shares)):
        free_stages = [
            stage for stage, count in enumerate(layer_counts) if count + 1 <= max_layers[stage]
        ]
        if not free_stages:
            return None
        emptiest_stage = min(
            free_stages, key=lambda stage: (layer_counts[stage] + 1) / shares[stage]
        )
        layer_counts[emptiest_stage] += 1
    return tuple(layer_counts) if len(shares) <= layers and min(shares) > 0 else None


class GpuGroups:
    """The best group of each size, and whether ranks can share a model, looked for once for all
    variants and engine versions."""

    def __init__(self, hardware: Hardware, promised_bytes: Mapping[str, int]) -> None:
        self._hardware = hardware
        self._promised_bytes = promised_bytes
        # Groups are many, so each is described by plain numbers and counted without a step of
        # Python.
        nvlinks = {
            pair: link.nvlinks or 0
            for link in hardware.links
            for pair in ((link.a, link.b), (link.b, link.a))
        }
        self._nvlinks = defaultdict(int, nvlinks)
        self._by_index = {gpu.index: gpu for gpu in hardware.gpus}
        self._free_bytes = {
            gpu.index: available_bytes(gpu, promised_bytes) for gpu in hardware.gpus
        }
        self._indexes_by_kind: dict[_GpuKind, list[int]] = {}
        for gpu in hardware.gpus:
            self._indexes_by_kind.setdefault(_gpu_kind(gpu), []).append(gpu.index)
        self._best_groups: dict[int, tuple[Gpu, ...] | None] = {}
        self._refusals: dict[tuple[BuiltModel, int, bool, int], tuple[str, str | None] | None] = {}

    def parallel_refusal(
        self, spec: ModelSpec, built_model: BuiltModel, tp: int, *, ep: bool, dp: int
    ) -> tuple[str, str | None] | None:
        key = built_model, tp, ep, dp
        if key not in self._refusals:
            self._refusals[key] = parallel_refusal(spec, built_model, tp, ep=ep, dp=dp)
        return self._refusals[key]

    def best_group(self, size: int) -> tuple[Gpu, ...] | None:
        """Alike GPUs: of the groups with room, most NVLink between them, then most memory, then
        lowest index. None: no kind has this many.

        A group counts when its fullest GPU has at least half of the free bytes of the best group:
        links between GPUs that are in use are worth less than memory.
        """
        if size not in self._best_groups:
            self._best_groups[size] = self._group_of_size(size)
        return self._best_groups[size]

    def _group_of_size(self, size: int) -> tuple[Gpu, ...] | None:
        """The best GPUs for this many ranks, by free memory and NVLinks; None: too few GPUs."""
        groups = [
            group
            for gpu_indexes in self._indexes_by_kind.values()
            for group in _candidate_groups(gpu_indexes, size, self._free_bytes, self._nvlinks)
        ]
        least_free_bytes = [min(map(self._free_bytes.__getitem__, group)) for group in groups]
        max_free_bytes = max(least_free_bytes, default=0)

        def preference(number: int) -> tuple[bool, int, int, list[int]]:
            group = groups[number]
            nvlinks = sum(map(self._nvlinks.__getitem__, combinations(group, 2)))
            return (
                2 * least_free_bytes[number] >= max_free_bytes,
                nvlinks,
                least_free_bytes[number],
                sorted(map(int.__neg__, group), reverse=True),
            )

        best_index = max(range(len(groups)), key=preference, default=None)
        return (
            None
            if best_index is None
            else tuple([self._by_index[index] for index in sorted(groups[best_index])])
        )

    def mixed_gpus(self, size: int) -> tuple[Gpu, ...] | None:
        """The GPUs with the most free bytes, of any kind, for stages; None: too few GPUs."""
        free_bytes = {
            gpu.uuid: available_bytes(gpu, self._promised_bytes)
            for gpu in self._hardware.gpus
            if gpu.total_bytes and gpu.capability
        }
        dedicated_gpus = [
            gpu
            for gpu in self._hardware.gpus
            if gpu.uuid in free_bytes and gpu.memory_kind == "dedicated"
        ]
        freest_gpus = sorted(dedicated_gpus, key=lambda gpu: (-free_bytes[gpu.uuid], gpu.index))[
            :size
        ]
        return (
            tuple(sorted(freest_gpus, key=lambda gpu: gpu.index))
            if len(freest_gpus) == size
            else None
        )
