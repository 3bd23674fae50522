"""The number of copies of a candidate that serve, and their speed. Pure.

copies(candidate, sizes) -> (number of copies and why, speed of all together)
"""

from __future__ import annotations

from dataclasses import replace

from gateway.domain import Choice, Speed, int_choice
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.speed.correction import measurement_scope
from gateway.engines.common.speed.count import work_with
from gateway.engines.common.speed.expectation import PlanLoad, expected
from gateway.engines.common.speed.machine import SpeedKnowledge, SpeedTable, machine_of
from gateway.engines.common.speed.objective import concurrency, gpu_discount, plan_outcome, score
from gateway.engines.common.speed.step import StepClock
from gateway.planner.parallel import spare_groups
from gateway.planner.sizes import Sizes, needed_tokens


def copies(candidate: Candidate, sizes: Sizes, *, direct: bool) -> tuple[Choice[int], Speed | None]:
    """The number of copies, and their speed; None: nothing is known of the GPUs.

    direct: ranks read each other's memory.
    """
    given, size, memory, context = (
        candidate.given,
        len(candidate.group),
        sizes.memory,
        sizes.context.value,
    )
    wish, clock = given.wish, _clock(candidate, sizes, direct=direct)
    groups = candidate.variant.dp
    evidence, known = candidate.evidence, given.corrections
    near = (
        measurement_scope(
            candidate.scope, evidence.kernels, evidence.attention, clock.machine.source
        )
        if known and clock
        else {}
    )
    ratios = known.ratios(near) if near else {}

    def speed(count: int) -> Speed | None:
        if clock is None:
            return None
        seqs, tokens = sizes.batch.seqs.value, sizes.batch.tokens.value
        kept = memory.kv_tokens if memory.kv_bytes_per_token else 0
        load = PlanLoad(concurrency(wish), count * groups, seqs, tokens, kept, context)
        return expected(load, clock, ratios)

    if wish.replicas:
        return int_choice(wish.replicas, "as asked for", "user"), speed(wish.replicas)
    alone, most = speed(1), spare_groups(given, size, memory.budget_bytes)
    most = min(most, wish.gpus // size) if isinstance(wish.gpus, int) and size else most
    one = int_choice(1, "one copy; other GPUs stay free" if most > 1 else "one copy", "planner")
    if most < 2 or alone is None or (many := speed(most)) is None:
        return one, alone
    needed, cost = needed_tokens(wish, given.spec), gpu_discount(wish.gpus)
    both = (
        plan_outcome(memory, alone, context, size, 1, needed, groups),
        plan_outcome(memory, many, context, size, most, needed, groups),
    )
    if score(both[1], wish.goal, cost) <= score(both[0], wish.goal, cost):
        return one, alone
    gain = many.total.value / alone.total.value
    reason = (
        f"{most} copies on {size * most} GPUs answer {gain:.1f} times as much as one, with"
        f" {many.concurrency} requests at once"
    )
    return int_choice(most, reason, "speed model"), many


def _clock(candidate: Candidate, sizes: Sizes, *, direct: bool) -> StepClock | None:
    """The clock of the work on these GPUs, shared by engine versions: it remembers its results."""
    given, group, pace, rows = (
        candidate.given,
        candidate.group,
        candidate.given.pace,
        candidate.evidence.kernels,
    )
    if not pace or not given.spec.generates:
        return None
    if parts := [_clock(part, sizes, direct=direct) for part in candidate.parts]:
        known = [clock for clock in parts if clock is not None]
        if len(known) < len(parts):
            return None
        sources = " and ".join(dict.fromkeys(clock.machine.source for clock in known))
        return replace(
            known[0], machine=known[0].machine.evolve(source=sources), beside=tuple(known[1:])
        )
    work = work_with(
        given.spec,
        candidate.stage,
        candidate.rank,
        rows,
        given.gpus,
        candidate.engine.traits,
        pace.table,
    )
    engine, batch = candidate.engine, sizes.batch
    graphs = pace.table.graphs(
        engine.kind, engine.version, batch.seqs.value, eager=batch.eager.value
    )
    key = work, tuple([gpu.index for gpu in group]), graphs, direct, engine.kind
    if key not in given.clocks:
        place = "machine", key[1], direct
        if place not in given.clocks:
            given.clocks[place] = machine_of(
                group, given.links, pace, given.measured, direct=direct
            )
        machine = given.clocks[place]
        given.clocks[key] = (
            StepClock(work, machine, _table(given, pace, engine.kind), graphs) if machine else None
        )
    clock: StepClock | None = given.clocks[key]
    return clock


def _table(given: PlanningInput, pace: SpeedKnowledge, kind: str) -> SpeedTable:
    if ("table", kind) not in given.clocks:
        given.clocks["table", kind] = pace.table.for_kind(kind)
    table: SpeedTable = given.clocks["table", kind]
    return table
