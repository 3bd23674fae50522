"""The number of copies of a candidate that serve, and their speed. Pure.

copies(candidate, sizes) -> (number of copies and why, speed of all together)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.domain import Choice, Speed, int_choice
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.speed.correction import measurement_scope
from gateway.engines.common.speed.count import rank_work_of_kernels
from gateway.engines.common.speed.expectation import PlanLoad, expected_speed
from gateway.engines.common.speed.machine import (
    Machine,
    SpeedKnowledge,
    SpeedTable,
    build_machine,
    machine_of_span,
)
from gateway.engines.common.speed.objective import concurrency, gpu_discount, plan_outcome, score
from gateway.engines.common.speed.step import StepClock
from gateway.planner.parallel import spare_groups
from gateway.planner.sizes import Sizes, needed_tokens

# Numbers of nodes with copies that are compared; more than 16 in steps of an eighth and more.
_NODE_COUNTS = (
    *range(1, 17),
    *(16 + 2 * step for step in range(1, 9)),
    *(32 + 4 * step for step in range(1, 9)),
    *(64 + 8 * step for step in range(1, 9)),
    *(128 + 16 * step for step in range(1, 57)),
)


def copies(
    candidate: Candidate, sizes: Sizes, *, has_direct_links: bool
) -> tuple[Choice[int], Speed | None]:
    """The number of copies, and their speed; None: nothing is known of the GPUs.

    has_direct_links: ranks read each other's memory.
    """
    inputs = candidate.inputs
    size = len(candidate.gpus)
    memory = sizes.memory
    wish = inputs.wish
    nodes = inputs.alike_nodes
    context = sizes.context.value
    clock = _clock(candidate, sizes, has_direct_links=has_direct_links)
    groups = candidate.variant.dp
    evidence, corrections = candidate.evidence, inputs.corrections
    scopes = (
        measurement_scope(
            candidate.scope, evidence.kernels, evidence.attention, clock.machine.source
        )
        if corrections and clock
        else {}
    )
    ratios = corrections.ratios(scopes) if scopes else {}

    def speed(count: int) -> Speed | None:
        if clock is None:
            return None
        seqs, tokens = sizes.batch.seqs.value, sizes.batch.tokens.value
        kv_tokens = memory.kv_tokens if memory.kv_bytes_per_token else 0
        load = PlanLoad(concurrency(wish), count * groups, seqs, tokens, kv_tokens, context)
        return expected_speed(load, clock, ratios)

    if count := wish.least_copies:
        return int_choice(count, "as asked for", "user"), speed(count)
    single_speed, on_node = speed(1), spare_groups(inputs, size, memory.budget_bytes)
    limit = wish.gpus // size if isinstance(wish.gpus, int) and size else on_node * nodes
    on_node, limit_of_machine = min(on_node, limit), min(on_node * nodes, limit)
    single_copy = int_choice(
        1, "one copy; other GPUs stay free" if limit_of_machine > 1 else "one copy", "planner"
    )
    tokens_needed, cost = needed_tokens(wish, inputs.spec), gpu_discount(wish)

    def worth(count: int) -> float:
        outcome = plan_outcome(memory, speed(count), context, size, count, tokens_needed, groups)
        return score(outcome, wish.goal, cost)

    if limit_of_machine < 2 or single_speed is None:
        return single_copy, single_speed
    # The smaller of equal numbers.
    counts = (1, limit_of_machine) if nodes == 1 else (1, *_node_counts(on_node, limit_of_machine))
    limit_of_machine = max(counts, key=worth)
    if limit_of_machine == 1 or (speed_of_most := speed(limit_of_machine)) is None:
        return single_copy, single_speed
    gain = speed_of_most.total.value / single_speed.total.value
    reason = (
        f"{limit_of_machine} copies on {size * limit_of_machine} GPUs answer {gain:.1f} times as"
        f" much as one, with {speed_of_most.concurrency} concurrent requests"
    )
    return int_choice(limit_of_machine, reason, "speed model"), speed_of_most


def _node_counts(on_node: int, limit: int) -> list[int]:
    """Numbers of copies on whole nodes, up to `limit`, that are worth a look.

    With one node more they are the same and others, so that a node more is never a loss.
    """
    counts = (on_node * nodes for nodes in _NODE_COUNTS)
    return [count for count in counts if count <= limit]


def _clock(candidate: Candidate, sizes: Sizes, *, has_direct_links: bool) -> StepClock | None:
    """The clock of the work on these GPUs, shared by engine versions: it remembers its results."""
    inputs = candidate.inputs
    speed_knowledge = candidate.inputs.speed_knowledge
    if not speed_knowledge or not inputs.spec.generates:
        return None
    if candidate.stage_candidates:
        return _joint_clock(
            [
                _clock(stage_candidate, sizes, has_direct_links=has_direct_links)
                for stage_candidate in candidate.stage_candidates
            ]
        )
    engine = candidate.engine
    batch = sizes.batch
    work = rank_work_of_kernels(
        inputs.spec,
        candidate.stage,
        candidate.rank,
        candidate.evidence.kernels,
        inputs.gpus,
        engine.traits,
        speed_knowledge.table,
    )
    graphs = speed_knowledge.table.graphs(
        engine.kind, engine.version, batch.seqs.value, is_eager=batch.eager.value
    )
    indexes = tuple([gpu.index for gpu in candidate.gpus])
    key = work, indexes, graphs, has_direct_links, engine.kind
    if key not in inputs.clocks:
        machine = _clocked_machine(candidate, speed_knowledge, has_direct_links=has_direct_links)
        inputs.clocks[key] = (
            StepClock(work, machine, _table(inputs, speed_knowledge, engine.kind), graphs)
            if machine
            else None
        )
    clock: StepClock | None = inputs.clocks[key]
    return clock


def _joint_clock(stage_clocks: Sequence[StepClock | None]) -> StepClock | None:
    """The clock of a plan of unequal stages; None: the speed of a stage is unknown."""
    clocks = [clock for clock in stage_clocks if clock is not None]
    if len(clocks) < len(stage_clocks):
        return None
    sources = " and ".join(dict.fromkeys(clock.machine.source for clock in clocks))
    return replace(
        clocks[0],
        machine=clocks[0].machine.evolve(source=sources),
        other_stages=tuple(clocks[1:]),
    )


def _clocked_machine(
    candidate: Candidate, speed_knowledge: SpeedKnowledge, *, has_direct_links: bool
) -> Machine | None:
    """The candidate's GPUs and the links between them, which many clocks share."""
    inputs = candidate.inputs
    gpus = candidate.gpus
    variant = candidate.variant
    span = inputs.span
    indexes = tuple([gpu.index for gpu in gpus])
    key = "machine", indexes, has_direct_links, *((variant.tp, variant.pp) if span else ())
    if key not in inputs.clocks:
        peers = gpus[: min(variant.tp, span.gpus_each)] if span else gpus
        local_machine = build_machine(
            peers,
            inputs.links,
            speed_knowledge,
            inputs.measurements,
            has_direct_links=has_direct_links,
        )
        inputs.clocks[key] = (
            machine_of_span(local_machine, span, variant.tp, variant.pp, speed_knowledge.table)
            if span and local_machine
            else local_machine
        )
    machine: Machine | None = inputs.clocks[key]
    return machine


def _table(inputs: PlanningInput, speed_knowledge: SpeedKnowledge, kind: str) -> SpeedTable:
    if ("table", kind) not in inputs.clocks:
        inputs.clocks["table", kind] = speed_knowledge.table.kind_table(kind)
    table: SpeedTable = inputs.clocks["table", kind]
    return table
