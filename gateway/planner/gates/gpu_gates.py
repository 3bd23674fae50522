"""Gates of GPUs: driver, number, layout of ranks, links, free memory. Pure."""

from __future__ import annotations

from collections.abc import Collection

from gateway.diagnosis.facts.peers import NCCL, failing_links
from gateway.domain import Engine, Gpu
from gateway.domain.units import gib, plural
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.layers.built_model import BuiltModel, is_in_tower
from gateway.engines.common.layers.stages import field_against_stages
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.refusal import RefusalError
from gateway.engines.common.span import Rendezvous
from gateway.engines.common.variant import Variant
from gateway.engines.registry import engine_kind
from gateway.planner.gates.kernel_gates import matching_fact
from gateway.planner.gates.machine_gates import gate_code, gate_host
from gateway.planner.parallel import GpuGroups, tower_heads, tower_refusal

# The trait of engines that refuse ranks with unlike free memory.
BALANCE_TRAIT = "balanced_ranks"


def gate_peers(inputs: PlanningInput, engine: Engine, gpus: tuple[Gpu, ...]) -> None:
    """Refuse GPUs that cannot communicate, even without peer-to-peer access."""
    if fact := failing_links(inputs.facts, engine, gpus).get(NCCL):
        names = ", ".join(str(gpu.index) for gpu in gpus)
        reason = (
            f"GPUs {names} could not talk to each other here, also without peer-to-peer access:"
            f" {fact.source}"
        )
        raise RefusalError("known_bad", reason, "fact")


def gate_driver(inputs: PlanningInput, engine: Engine) -> None:
    """Refuse an old driver, another processor, and a version that failed at this task before."""
    for capability in {gpu.capability for gpu in inputs.hardware.gpus} or {None}:
        scope = {
            "engine": engine.ref,
            "capability": capability,
            "architecture": inputs.spec.architecture,
            "model": inputs.spec.versioned_source,
            "task": inputs.spec.task,
        }
        scope |= {"quantization": inputs.spec.quant.method if inputs.spec.quant else None}
        if fact := matching_fact(inputs.facts, "engine_fails", scope):
            raise RefusalError(
                "known_bad", f"{engine.ref} is known not to do this: {fact.source}", "fact"
            )
    gate_host(inputs.hardware, engine)


def gate_devices(
    inputs: PlanningInput,
    engine: Engine,
    built_model: BuiltModel,
    variant: Variant,
    groups: GpuGroups,
) -> tuple[Gpu, ...]:
    """The GPUs of the variant; none on a CPU. Raises RefusalError."""
    gpus = inputs.hardware.gpus
    tp = variant.tp
    pp = variant.pp
    ranks = variant.ranks
    if engine.device == "cpu":
        if ranks > 1:
            raise RefusalError(
                "illegal_parallelism", "parallelism on a CPU is not planned", "planner"
            )
        return ()
    if len(gpus) < ranks:
        raise RefusalError(
            "no_device",
            f"{plural(ranks, 'GPU')} {'is' if ranks == 1 else 'are'} needed, and the machine has"
            f" {len(gpus)}",
            "probe",
        )
    sources = engine_kind(engine.kind).code_sources
    problem = groups.parallel_refusal(inputs.spec, built_model, tp, ep=variant.ep, dp=variant.dp)
    if problem is None or is_in_tower(problem[1] or ""):
        _gate_tower(inputs, engine, built_model, tp)
    if problem is not None:
        reason, layer = problem
        raise RefusalError("illegal_parallelism", reason, sources.ranks, layer=layer)
    layers = sum(group.layers for group in inputs.spec.attention if group.kind != "vision")
    if pp > layers:
        raise RefusalError(
            "illegal_parallelism",
            f"{layers} layers cannot be shared by {pp} stages",
            sources.stages,
        )
    if pp > 1 and (field := field_against_stages(built_model, engine, inputs.spec.architecture)):
        reason = f"{engine.ref} cannot share {inputs.spec.architecture} by stages of a pipeline"
        raise RefusalError(
            "illegal_parallelism", reason, engine.sources.get(field, f"profile {engine.ref}")
        )
    # Unlike GPUs hold stages, or the ranks of one stage.
    has_one_split = variant.dp == 1 and 1 in (tp, pp)
    group = groups.best_group(ranks) or (groups.mixed_gpus(ranks) if has_one_split else None)
    if group is None:
        raise RefusalError("no_device", f"there are no {ranks} GPUs of one kind", "probe")
    if group[0].total_bytes is None:
        raise RefusalError(
            "unknown_memory", f"the memory of {group[0].name} could not be read", "probe"
        )
    for gpu in group:
        gate_code(engine, gpu)
    return group


def keeps_tower_whole(
    inputs: PlanningInput, engine: Engine, built_model: BuiltModel, tp: int
) -> bool:
    """Whether each of `tp` ranks holds all of the vision tower: by a flag of the user, or because
    this version cuts none whose heads do not divide."""
    flag, whole_value = engine_kind(engine.kind).whole_tower_flag
    options = {name.replace("_", "-"): value for name, value in inputs.wish.args.items()}
    return bool(_has_tower_flag(engine) and options.get(flag) == whole_value) or (
        inputs.spec.architecture in engine.whole_towers and tower_heads(built_model, tp) > 0
    )


def _has_tower_flag(engine: Engine) -> bool:
    """Whether this version has the kind's flag for a whole tower."""
    flag, _ = engine_kind(engine.kind).whole_tower_flag
    return engine.spelling.get(flag, flag) in engine.flags


def _gate_tower(inputs: PlanningInput, engine: Engine, built_model: BuiltModel, tp: int) -> None:
    """Refuse ranks that cannot share the vision tower, unless each holds all of it."""
    if inputs.wish.text_only or keeps_tower_whole(inputs, engine, built_model, tp):
        return
    if reason := tower_refusal(built_model, tp):
        flag, value = engine_kind(engine.kind).whole_tower_flag
        argument = f"--arg {flag}={str(value).lower()}"
        cure = f"; {argument} keeps it whole on every GPU" if _has_tower_flag(engine) else ""
        raise RefusalError("illegal_parallelism", reason + cure, f"profile {engine.ref}")


def gate_groups(
    inputs: PlanningInput, engine: Engine, rules: EngineRules, variant: Variant
) -> None:
    """Refuse groups of ranks with requests of their own where the model or version has none."""
    if variant.dp == 1:
        return
    reason = rules.grouped_refusal(inputs.spec, engine, variant.tp * variant.dp)
    if not reason and variant.pp > 1:
        reason = "data parallel groups with stages of a pipeline are not planned"
    if reason:
        raise RefusalError("illegal_parallelism", reason, f"profile {engine.ref}")


def gate_nodes(inputs: PlanningInput, engine: Engine, variant: Variant) -> None:
    """Refuse ranks on several nodes where the version lacks the flags by which nodes meet."""
    if inputs.span is None:
        return
    meeting = Rendezvous(inputs.span.nodes, variant.dp, "", 0, 0)
    flags = engine_kind(engine.kind).node_flags(meeting, 1)
    if missing_flags := sorted(f"--{name}" for name in flags if name not in engine.flags):
        raise RefusalError(
            "illegal_parallelism",
            f"{engine.ref} cannot have ranks on several nodes: it has no"
            f" {', '.join(missing_flags)}",
            f"profile {engine.ref}",
        )


def gate_balance(engine: Engine, tp: int, free_bytes: Collection[int]) -> None:
    """Refuse ranks with unlike free memory where the engine does."""
    if tp < 2 or BALANCE_TRAIT not in engine.traits:
        return
    if 10 * min(free_bytes) < 9 * max(free_bytes):
        reason = (
            f"{engine.ref} refuses ranks where one GPU has less than nine tenths of another's free"
            f" memory: {gib(min(free_bytes))} and {gib(max(free_bytes))} are free"
        )
        source = engine_kind(engine.kind).code_sources.balanced_ranks
        raise RefusalError("no_device", reason, source)
