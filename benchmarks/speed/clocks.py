"""The speed model's clock of a plan, for any load, model, machine and flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.domain import Hardware, ModelSpec, Plan, Wish
from gateway.engines.common.layers.build import build, relevant_traits
from gateway.engines.common.layers.stages import stage
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.speed.count import rank_work_of_kernels
from gateway.engines.common.speed.machine import Machine, SpeedTable, build_machine
from gateway.engines.common.speed.step import StepClock
from gateway.engines.common.speed.work import RankWork
from gateway.engines.registry import engine_kind
from gateway.models.rank import Rank
from gateway.models.spec import read_model
from gateway.planner.decide import decide
from gateway.profiles.profiles import Profiles

PROFILES = Profiles()


class Timed(NamedTuple):
    """A plan, and what its clock is made of."""

    plan: Plan
    work: RankWork
    machine: Machine

    def clock(self, table: SpeedTable, version: str | None = None) -> StepClock:
        """version: of the engine that was measured, where it is not the plan's."""
        plan = self.plan
        kind, seqs = plan.engine.kind, plan.max_num_seqs.value
        graphs = table.graphs(
            kind, version or plan.engine.version, seqs, is_eager=plan.enforce_eager.value
        )
        return StepClock(self.work, self.machine, table.kind_table(kind), graphs)


def time_kernels(
    config: Mapping[str, Any],
    hardware: Hardware,
    engine: str,
    tp: int,
    pp: int,
    args: Mapping[str, Any],
) -> Timed | None:
    """None: no plan of this engine has these ranks."""
    spec = read_model("m", None, config, None, None, (), None)
    found_engine = PROFILES.engine(engine)
    flags = {**args, "pipeline-parallel-size": pp} if pp > 1 else dict(args)
    wish = Wish(name="m", source="m", gpus=tp * pp, tensor_parallel=tp, replicas=1, args=flags)
    rules = PROFILES.rules([found_engine])
    planning_input = PlanningInput(
        spec, hardware, wish, gpus=PROFILES.gpus, speed_knowledge=PROFILES.speed_knowledge
    )
    plans = decide(planning_input, [found_engine], rules).plans
    plan = next(
        (
            each_plan
            for each_plan in plans
            if not each_plan.quantizes_weights and each_plan.pipeline_parallel.value == pp
        ),
        None,
    )
    return None if plan is None else _time_kernels(plan, spec, hardware)


def _time_kernels(plan: Plan, spec: ModelSpec, hardware: Hardware) -> Timed | None:
    engine = PROFILES.engine(str(plan.engine))
    group = [gpu for gpu in hardware.gpus if gpu.uuid in plan.gpus]
    tp, pp = plan.tensor_parallel.value, plan.pipeline_parallel.value
    ep = tp if plan.expert_parallel.value else 1
    rank = Rank(tp, pp, ep, plan.dtype.value, plan.kv_cache_dtype.value, group[0].capability or "")
    built = stage(
        build(spec, relevant_traits(spec, engine.traits)),
        engine,
        engine_kind(engine.kind),
        spec.architecture,
        pp,
    )
    work = rank_work_of_kernels(
        spec,
        built,
        rank,
        plan.kernels,
        PROFILES.gpus,
        engine.traits,
        PROFILES.speed_knowledge.table,
    )
    links = {frozenset((link.a, link.b)): link for link in hardware.links}
    machine = build_machine(
        group, links, PROFILES.speed_knowledge, has_direct_links=plan.custom_all_reduce.value
    )
    return None if machine is None else Timed(plan, work, machine)
