"""The first plan's number of GPUs beside its neighbours, in figures."""

from __future__ import annotations

from typing import Any

from gateway.domain import Plan
from gateway.planner import explain
from gateway.planner.comparison import gains, gpu_choice, gpu_comparison, gpus_of, layout_of
from gateway.profiles.profiles import Profiles
from tests.support.makers import machine, wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()
ENGINES = [PROFILES.engine(ref) for ref in (VLLM_REF, "vllm==0.26.0", SGLANG_REF)]
DECISION = decide(
    published_model("qwen3-8b"),
    machine("8xh100"),
    ENGINES,
    wish(),
    rules=PROFILES.rules(ENGINES),
    gpus=PROFILES.gpus,
    speed_knowledge=PROFILES.speed_knowledge,
)


def test_the_first_plan_is_compared_with_the_neighbouring_numbers_of_gpus() -> None:
    best, words = DECISION.plans[0], DECISION.why_gpus
    assert words == gpu_comparison(DECISION.plans, DECISION.rejected)
    by_count: dict[int, Plan] = {}
    for plan in DECISION.plans:
        by_count.setdefault(gpus_of(plan), plan)
    gpu_count = gpus_of(best)
    fewer = max(count for count in by_count if count < gpu_count)
    more = min(count for count in by_count if count > gpu_count)
    parts = words.split("; ")
    assert parts[0] == f"{gpu_count} over {fewer}: {gains(best, by_count[fewer])}"
    assert parts[1] == f"{gpu_count} over {more}: {gains(best, by_count[more])}"
    row = next(row for row in explain.choices(best, words) if row.name == "GPUs")
    assert row == ("GPUs", str(gpu_count), words, False)


def test_gains_are_parts_of_speed_and_numbers_of_room_and_context() -> None:
    plan = DECISION.plans[0]
    assert plan.speed is not None
    stream, total = plan.speed.stream, plan.speed.total
    faster = plan.speed.evolve(
        stream=stream.evolve(value=stream.value * 1.38), total=total.evolve(value=total.value / 2)
    )
    figures = plan.memory.evolve(full_requests=12.0)
    better = plan.evolve(speed=faster, memory=figures)
    room = f"{plan.memory.full_requests:.3g}"
    assert gains(better, plan) == (
        "+38% alone, -50% with 32 concurrent, room for 12 requests of 40,960 tokens"
        f" instead of {room}"
    )
    roomy = plan.evolve(memory=plan.memory.evolve(full_requests=3_996.45))
    assert "room for 3,996 requests of" in gains(roomy, plan)
    longer = plan.evolve(max_model_len=plan.max_model_len.evolve(value=81_920), drops=("images",))
    assert gains(longer, plan).endswith(
        "+0% with 32 concurrent, 81,920 tokens of context instead of 40,960, without images"
    )
    slower = plan.speed.evolve(stream=stream.evolve(value=stream.value * 0.999))
    assert gains(plan.evolve(speed=slower), plan).startswith("+0% alone")
    silent = plan.evolve(speed=None)
    assert gains(silent, plan) == "no difference that is known"


def test_an_8b_model_leaves_half_of_eight_h100_and_says_how_to_take_less_or_more() -> None:
    """The third doubling of GPUs gives less than a quarter more."""
    best = DECISION.plans[0]
    assert gpus_of(best) == 4
    few_plan, everything = plans_with(gpus="few")[0], plans_with(gpus="all")[0]
    assert (gpus_of(few_plan), gpus_of(everything)) == (1, 8)
    words = gpu_choice(best, 8, {"few": few_plan, "all": everything})
    assert words == (
        f"Takes 4 of 8 GPUs and leaves 4. 4 over 1 (`--gpus few`): {gains(best, few_plan)}."
        f" 4 over 8 (`--gpus all`): {gains(best, everything)}."
    )
    assert gpu_choice(everything, 8, {"few": few_plan}).startswith(
        "Takes 8 of 8 GPUs. 8 over 1 (`--gpus few`): "
    )
    assert gpu_choice(few_plan, 8, {"few": few_plan}) == "Takes 1 of 8 GPUs and leaves 7."
    assert gpu_choice(few_plan, 1, {}) == ""


def test_throughput_and_a_large_model_fill_the_machine() -> None:
    assert gpus_of(plans_with(goal="throughput")[0]) == 8
    large = decide(
        published_model("deepseek-v3"),
        machine("8xh200"),
        ENGINES[:1],
        wish(),
        rules=PROFILES.rules(ENGINES[:1]),
        gpus=PROFILES.gpus,
        speed_knowledge=PROFILES.speed_knowledge,
    )
    assert gpus_of(large.plans[0]) == 8


def plans_with(**fields: Any) -> tuple[Plan, ...]:
    """The plans of one engine for the same model and machine, with this wish."""
    return decide(
        published_model("qwen3-8b"),
        machine("8xh100"),
        ENGINES[:1],
        wish(**fields),
        rules=PROFILES.rules(ENGINES[:1]),
        gpus=PROFILES.gpus,
        speed_knowledge=PROFILES.speed_knowledge,
    ).plans


def test_the_refusal_of_fewer_gpus_needs_no_plan_of_them() -> None:
    large = decide(
        published_model("llama-3.1-8b"),
        machine("2x3090"),
        ENGINES[:1],
        wish(min_context=131072, gpus=2),
        rules=PROFILES.rules(ENGINES[:1]),
        gpus=PROFILES.gpus,
        speed_knowledge=PROFILES.speed_knowledge,
    )
    assert large.plans
    assert gpus_of(large.plans[0]) == 2
    assert "1 GPU: no_memory, " in large.why_gpus


def test_no_plan_and_a_cpu_have_no_reason() -> None:
    assert gpu_comparison((), ()) == ""
    assert gpu_comparison((DECISION.plans[0].evolve(gpus=()),), ()) == ""


def test_a_shape_is_one_row_with_all_its_engine_versions() -> None:
    rows = explain.shapes(DECISION.plans)
    assert len({row[1:3] for row in rows}) == len(rows)
    assert [int(row[0]) for row in rows] == sorted(int(row[0]) for row in rows)
    assert sum(plan.rank == 1 for plan in DECISION.plans) == 1
    first_row = rows[0]
    assert first_row[0] == "1"
    for plan in DECISION.plans:
        row = next(row for row in rows if row[1:3] == (str(gpus_of(plan)), layout_of(plan)))
        assert plan.engine.version in row[-1]
        assert f"{plan.engine.kind}==" in row[-1]


def test_versions_with_different_changes_are_listed_separately() -> None:
    best = DECISION.plans[0]
    older = best.evolve(rank=2, verdict="degraded", engine=best.engine.evolve(version="0.1.0"))
    (row,) = explain.shapes((best, older))
    assert row[-1] == f"{best.engine.kind}=={best.engine.version}; vllm==0.1.0: (degraded)"
