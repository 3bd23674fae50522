"""The first plan and settings of experienced users (benchmarks/experts.yaml).

    python benchmarks/speed/experts.py

    --configs FOLDER     model_configs of aiconfigurator-core, for rows that name them

A plan agrees if it has the tensor and pipeline parallelism of one of their settings. Data parallel
ranks count as replicas, or as more tensor parallelism. The number of replicas on a machine is not
compared, as the sources describe one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Plan, Wish
from gateway.engines.common.planning_input import PlanningInput
from gateway.errors import FitserveError
from gateway.models.spec import read_model
from gateway.planner.decide import decide
from speed.clocks import PROFILES
from speed.published import model_config
from tests.support.outside import Choice, experts


def first_plan(one: Choice, configs: Path | None) -> Plan | str:
    """The best plan of all engines, or why there is none."""
    read = model_config(one.config, one.quantization, configs, one.fields)
    if read is None:
        return "its config.json is not here"
    hardware = PROFILES.hardware(one.machine)
    spec = read_model("m", None, read, None, None, (), None)
    engines = PROFILES.engines((), device="cuda")
    rules = PROFILES.rules(engines)
    told = {name: value for name, value in one.wish.model_dump().items() if value is not None}
    wish = Wish.model_validate({"name": "m", "source": "m", **told})
    facts = KnownFacts(PROFILES.facts)
    planning_input = PlanningInput(
        spec, hardware, wish, facts, gpus=PROFILES.gpus, speed_knowledge=PROFILES.speed_knowledge
    )
    found = decide(planning_input, engines, rules)
    return found.plans[0] if found.plans else f"no plan: {found.rejected[0].reasons[0][:120]}"


def as_theirs(plan: Plan, one: Choice) -> bool:
    tp, pp = plan.tensor_parallel.value, plan.pipeline_parallel.value
    return any(
        pp == told.pipeline_parallel
        and tp in (told.tensor_parallel, told.tensor_parallel * told.data_parallel)
        for told in one.accepted
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=Path)
    args = parser.parse_args()
    right: list[tuple[Choice, Plan]] = []
    wrong: list[tuple[Choice, Plan]] = []
    none: list[tuple[Choice, str]] = []
    for expert in experts():
        try:
            plan = first_plan(expert, args.configs)
        except FitserveError as error:
            plan = str(error)
        if isinstance(plan, str):
            none.append((expert, plan))
        else:
            (right if as_theirs(plan, expert) else wrong).append((expert, plan))
    for expert, why in none:
        print(f"none   {expert.model} {expert.quantization} on {expert.machine}: {why}")
    for expert, plan in wrong:
        theirs = sorted(
            {
                f"TP{told.tensor_parallel} PP{told.pipeline_parallel} DP{told.data_parallel}"
                for told in expert.accepted
            }
        )
        copies = f" x{plan.replicas.value}" if plan.replicas.value > 1 else ""
        print(
            f"other  {expert.model} {expert.quantization} on {expert.machine}: {plan.engine}"
            f" TP{plan.tensor_parallel.value} PP{plan.pipeline_parallel.value}{copies},"
            f" {plan.max_model_len.value} tokens; theirs {', '.join(theirs)}"
        )
        if expert.ours:
            print(f"       {expert.ours}")
    print(
        f"{len(right)} of {len(right) + len(wrong)} first plans are as theirs, {len(none)} have"
        " none; median context"
        f" {statistics.median(plan.max_model_len.value for _, plan in right):,.0f}"
    )


if __name__ == "__main__":
    main()
