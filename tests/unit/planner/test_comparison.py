"""The first plan's number of GPUs beside its neighbours, in figures."""

from __future__ import annotations

from gateway.planner import explain
from gateway.planner.comparison import gpu_comparison, gpus_of, layout_of
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
    pace=PROFILES.pace,
)


def test_the_first_plan_is_compared_with_the_neighbouring_numbers_of_gpus() -> None:
    best, words = DECISION.plans[0], DECISION.why_gpus
    assert words == gpu_comparison(DECISION.plans, DECISION.rejected)
    assert best.speed is not None
    assert words.startswith(
        f"{gpus_of(best)} GPUs as {layout_of(best)}: {best.speed.stream.value:,g} tokens/s alone"
    )
    assert f"requests of {best.max_model_len.value:,} tokens of context" in words
    counts = {gpus_of(plan) for plan in DECISION.plans}
    fewer = [count for count in counts if count < gpus_of(best)]
    more = [count for count in counts if count > gpus_of(best)]
    assert fewer or more
    for count in (max(fewer, default=None), min(more, default=None)):
        assert count is None or f"{count} GPU" in words
    row = next(row for row in explain.choices(best, words) if row[0] == "GPUs")
    assert row == ("GPUs", str(gpus_of(best)), words)


def test_without_a_plan_of_fewer_gpus_their_refusal_is_told() -> None:
    large = decide(
        published_model("llama-3.1-8b"),
        machine("2x3090"),
        ENGINES[:1],
        wish(min_context=131072, gpus=2),
        rules=PROFILES.rules(ENGINES[:1]),
        gpus=PROFILES.gpus,
        pace=PROFILES.pace,
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
    first = rows[0]
    assert first[0] == "1"
    for plan in DECISION.plans:
        row = next(row for row in rows if row[1:3] == (str(gpus_of(plan)), layout_of(plan)))
        assert plan.engine.version in row[-1]
        assert f"{plan.engine.kind}==" in row[-1]


def test_versions_with_other_changes_stand_apart() -> None:
    best = DECISION.plans[0]
    older = best.evolve(rank=2, verdict="degraded", engine=best.engine.evolve(version="0.1.0"))
    (row,) = explain.shapes((best, older))
    assert row[-1] == f"{best.engine.kind}=={best.engine.version}; vllm==0.1.0: (degraded)"
