"""When a plan lets the engine order its requests by the priority of their callers."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Engine, Plan
from gateway.domain.choice import ONE_CLASS
from gateway.engines.registry import engine_kind
from gateway.planner.proposal.default_choices import is_default
from gateway.planner.sharing.restore import restore_decision
from gateway.profiles.profiles import Profiles
from tests.conformance.layer_cases import case
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import model_from_config

PROFILES = Profiles()
VERSIONS = [
    "vllm==0.18.0",
    "vllm==0.19.1",
    "vllm==0.26.0",
    "vllm==0.33.0",
    "sglang==0.5.10.post1",
    "sglang==0.5.23",
]


def first_plan(
    version: str = "vllm==0.33.0",
    classes: int = 2,
    *,
    flags: Any = None,
    model: str = "llama-3.1-8b",
    **fields: Any,
) -> Plan:
    """The first plan of a model of the cases on one H200.

    flags: flags of the engine, instead of those of its profile.
    """
    engines: list[Engine] = PROFILES.engines((version,), device="cuda")
    if flags is not None:
        engines = [engine.evolve(flags=flags(engine.flags)) for engine in engines]
    return decide(
        model_from_config(case(model, "none")),
        PROFILES.hardware("h200"),
        engines,
        wish(**fields),
        PROFILES.facts,
        rules=PROFILES.rules(engines),
        speed_knowledge=PROFILES.speed_knowledge,
        key_classes=classes,
    ).plans[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_engine_orders_its_requests_where_keys_have_several_classes(version: str) -> None:
    plan = first_plan(version)
    assert plan.request_order.value == "priority"
    assert plan.request_order.source.startswith("profile ")
    assert "keys have 2 classes" in plan.request_order.reason
    assert "computed again" in plan.request_order.reason  # its cost
    assert engine_kind(plan.engine.kind).priority_factor(plan.argv) == 1
    assert not is_default("request_order", plan.request_order)


def prompt_pieces(plan: Plan) -> list[str]:
    return [item for item in plan.argv if item.startswith("--long-prefill-token-threshold=")]


@pytest.mark.parametrize("version", [version for version in VERSIONS if "vllm" in version])
def test_a_long_prompt_leaves_three_quarters_of_a_step_to_others(version: str) -> None:
    plan = first_plan(version)
    tokens = plan.max_num_batched_tokens.value // 4
    assert prompt_pieces(plan) == [f"--long-prefill-token-threshold={tokens}"]
    assert not prompt_pieces(first_plan(version, 1))
    assert not prompt_pieces(first_plan(version, args={"enable-chunked-prefill": False}))
    owner_plan = first_plan(version, args={"long-prefill-token-threshold": 77})
    assert prompt_pieces(owner_plan) == ["--long-prefill-token-threshold=77"]


@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen2.5-vl-7b", "gemma-4-31b"])
def test_prompts_that_the_engine_reads_in_blocks_are_not_divided(name: str) -> None:
    plan = first_plan(model=name)
    assert plan.request_order.value == "priority"
    assert not prompt_pieces(plan)


@pytest.mark.parametrize("version", VERSIONS)
def test_one_class_leaves_the_order_to_the_engine(version: str) -> None:
    plan = first_plan(version, 1)
    assert (plan.request_order.value, plan.request_order.reason) == ("arrival", ONE_CLASS)
    assert engine_kind(plan.engine.kind).priority_factor(plan.argv) == 0
    assert is_default("request_order", plan.request_order)


def test_requests_without_a_priority_are_normal_at_sglang() -> None:
    assert "--default-priority-value=0" in first_plan("sglang==0.5.23").argv


def test_an_engine_without_the_flag_says_so() -> None:
    plan = first_plan(
        flags=lambda flags: {
            name: flag for name, flag in flags.items() if name != "scheduling-policy"
        }
    )
    assert plan.request_order.value == "arrival"
    assert "no order by priority" in plan.request_order.reason


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "arrival"), ("priority", "priority")])
@pytest.mark.parametrize("classes", [1, 2])
def test_the_owner_of_a_model_has_the_last_word(policy: str, order: str, classes: int) -> None:
    plan = first_plan(classes=classes, args={"scheduling-policy": policy})
    assert (plan.request_order.value, plan.request_order.source) == (order, "user")
    assert [item for item in plan.argv if item.startswith("--scheduling-policy")] == [
        f"--scheduling-policy={policy}"
    ]


def test_sglang_orders_nothing_beside_an_order_by_prefixes() -> None:
    plan = first_plan("sglang==0.5.23", args={"schedule-policy": "lpm"})
    assert plan.request_order.value == "arrival"
    assert "--schedule-policy=lpm" in plan.request_order.reason
    assert "--enable-priority-scheduling" not in plan.argv


def test_a_first_key_of_another_class_costs_no_engine_its_place() -> None:
    plain, ordered = first_plan(classes=1), first_plan()
    engines = PROFILES.engines(("vllm==0.33.0",), device="cuda")
    decision = decide(
        model_from_config(case("llama-3.1-8b", "none")),
        PROFILES.hardware("h200"),
        engines,
        wish(),
        PROFILES.facts,
        rules=PROFILES.rules(engines),
        speed_knowledge=PROFILES.speed_knowledge,
        key_classes=2,
    )
    assert decision.plans[0].argv == ordered.argv != plain.argv
    assert restore_decision(decision, plain) is not None
