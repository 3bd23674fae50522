"""Pipeline stages of unequal size for GPUs of unequal memory or speed. Pure."""

from __future__ import annotations

from gateway.domain import Gpu, Memory
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.layers.stages import parts_of_every_stage, stage_model
from gateway.engines.common.layers.weights import weights_bytes
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.speed.machine import build_machine
from gateway.engines.common.variant import Variant
from gateway.planner.parallel import layers_per_stage


def unequal_stages(
    candidate: Candidate, layers: int, memory: Memory, context: int
) -> list[Variant]:
    """The variants with stages by the memory and by the speed of each GPU.

    layers: the number of layers of the model.
    memory: the need of the candidate with equally many layers on each GPU.
    context: tokens of KV cache to hold.
    """
    inputs = candidate.inputs
    variant = candidate.variant
    stages = candidate.stage_candidates
    if not stages:
        return []
    gpus = [stage.gpus[0] for stage in stages]
    fixed_bytes = memory.activation_bytes + memory.overhead_bytes
    outer_bytes = [
        _weights_bytes(
            stage,
            tuple(
                layers if index == int(stage.stage_number == 0) else 0
                for index in range(variant.pp)
            ),
        )
        for stage in stages
    ]
    free_bytes = [
        (gpu.total_bytes or 0) * memory.budget_bytes / memory.gpu_bytes - fixed_bytes - size
        for gpu, size in zip(gpus, outer_bytes, strict=True)
    ]
    if min(free_bytes) <= 0:
        return []
    weights = _weights_bytes(stages[0], (layers,) + (0,) * (variant.pp - 1)) - outer_bytes[0]
    kv_bytes = memory.kv_bytes_per_token * context / -(-layers // variant.pp)
    layer_bytes = weights / layers + kv_bytes
    divisions = {
        layers_per_stage(layers, free_bytes, [layers] * len(free_bytes)): "by what each GPU holds"
    }
    speeds = _memory_speeds(inputs, gpus)
    if speeds and min(speeds) > 0:
        limits = [size / layer_bytes for size in free_bytes]
        divisions.setdefault(layers_per_stage(layers, speeds, limits), "by how fast each GPU is")
    names = " and ".join(gpu.name for gpu in gpus)
    return [
        variant.add_change(
            "layers",
            counts,
            f"{' and '.join(map(str, counts))} layers on {names}, {reason}",
            "planner",
        )
        for counts, reason in divisions.items()
        if counts is not None and len(set(counts)) > 1
    ]


def _memory_speeds(inputs: PlanningInput, gpus: list[Gpu]) -> list[float]:
    """Bytes per second of each GPU's memory, 0 where unknown; empty: no speeds are known."""
    if inputs.speed_knowledge is None:
        return []
    machines = (
        build_machine(
            (gpu,), inputs.links, inputs.speed_knowledge, inputs.measurements, has_direct_links=True
        )
        for gpu in gpus
    )
    return [machine.memory if machine else 0.0 for machine in machines]


def _weights_bytes(candidate: Candidate, layers: tuple[int, ...]) -> int:
    """Bytes of weights of this stage if the stages have these numbers of layers."""
    model = stage_model(
        candidate.built_model,
        layers,
        candidate.stage_number,
        parts_of_every_stage(candidate.engine, candidate.inputs.spec.architecture),
    )
    return weights_bytes(model, candidate.rank, candidate.engine.traits) or 0
