"""Starts that an engine refuses are not plans, in its parser, its configuration or its
constructors; those beside them are.

The golden answers are made anew by scripts/engine-answers (tests/conformance/start_questions.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from gateway.domain import Decision, Plan, RejectedPlan, Scalar
from gateway.profiles.profiles import Profiles
from tests.conformance import start_questions
from tests.conformance.golden import pairs
from tests.conformance.start_cases import CAPABILITIES, Start, config
from tests.conformance.test_whole_models import kept_scales, machine
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import model_from_config
from tests.support.versions import VLLM, since

PROFILES = Profiles()
ENGINES = [PROFILES.engine(f"vllm=={version}") for version in VLLM]
RULES = PROFILES.rules(ENGINES)
# The share of the bytes of weights.
EXACT = 0.0001


def make_decision(model: str, quant: str, capability: str, **args: Scalar) -> Decision:
    """Of all versions, on one GPU on which nothing is too large."""
    spec = model_from_config(config(model, quant))
    return decide(
        spec,
        machine(capability),
        ENGINES,
        wish(args=args, tensor_parallel=1, text_only=True),
        rules=RULES,
    )


@cache
def decision_at_start(start: Start) -> Decision:
    model, quant, capability, dtype, kv_dtype = start
    flags: dict[str, Scalar] = {
        "dtype": dtype,
        "kv-cache-dtype": kv_dtype,
        "max-model-len": 4096,
        "enforce-eager": True,
    }
    return make_decision(model, quant, capability, **flags)


def experts_of(start: Start) -> int:
    expert_count: int = config(start[0], start[1]).get("num_local_experts", 0)
    return expert_count


def outcome(decision: Decision, version: str) -> Plan | RejectedPlan:
    """The result of the way in which nothing is changed."""
    plain = [plan for plan in decision.plans if plan.engine.version == version and plan.cost == 0]
    return (
        plain
        + [rejection for rejection in decision.rejected if rejection.engine.version == version]
    )[0]


def difference(
    version: str, outcome: Plan | RejectedPlan, answer: dict[str, Any], experts: int = 0
) -> str:
    """The planner's different answer; "": nothing."""
    if isinstance(outcome, RejectedPlan):
        starts = "refused" not in answer and not (
            outcome.verdict == "runtime_fail" or later(version, outcome)
        )
        return f"it starts; ours {outcome.verdict}: {outcome.reasons[0]}" if starts else ""
    if "refused" in answer:
        return f"{answer['refused']}; ours is a plan"
    assert outcome.memory is not None
    # A tower that torch computes has no layer of attention in the engine.
    backends = sorted({row.backend or row.status for row in outcome.attention} - {"torch"})
    planner_values = {"dtype": outcome.dtype.value, "attention": backends}
    differences = [
        f"{name}: {answer[name]}, ours {planner_value}"
        for name, planner_value in planner_values.items()
        if answer[name] != planner_value
    ]
    weight_bytes = outcome.memory.weights_bytes - kept_scales(version, outcome.kernels, experts)
    return "; ".join(
        differences
        + (
            [f"weights: {answer['weights']}, ours {weight_bytes}"]
            if abs(weight_bytes / answer["weights"] - 1) > EXACT
            else []
        )
    )


def later(version: str, rejection: RejectedPlan) -> bool:
    """Whether a plan is refused for a limit that the engine finds once it compiles: its code for
    GPUs, which was not asked, the shared memory of Triton's code, or types of Triton, which
    versions before 0.26 check no earlier."""
    if "is compiled for compute capability" in rejection.reasons[0]:
        return True
    at_start = [
        refusal for row in rejection.attention for refusal in row.refusals if refusal.is_at_start
    ]
    return any(
        "of shared memory" in refusal.reason or not since(version, "0.26") for refusal in at_start
    )


@pytest.mark.parametrize("version", VLLM)
def test_every_start_equals_the_engines_reading(version: str) -> None:
    wrong = [
        f"{' '.join(start)}: {words}"
        for capability in CAPABILITIES
        for start, answer in pairs(start_questions, version, capability)
        if answer is not None
        and (
            words := difference(
                version, outcome(decision_at_start(start), version), answer, experts_of(start)
            )
        )
    ]
    assert wrong == []


@pytest.mark.parametrize("version", VLLM)
def test_no_dtype_is_chosen_that_the_engine_refuses(version: str) -> None:
    answers = {
        start: answer
        for capability in CAPABILITIES
        for start, answer in pairs(start_questions, version, capability)
        if answer is not None
    }
    wrong = []
    for model, quant, capability in sorted(
        {start[:3] for start in answers if start[4] == "auto" and start[2] < "8"}
    ):
        for plan in make_decision(model, quant, capability).plans:
            start = (model, quant, capability, plan.dtype.value, plan.kv_cache_dtype.value)
            if plan.engine.version == version and "refused" in answers.get(
                start, {"refused": "not asked"}
            ):
                wrong.append(f"{' '.join(start)}: {answers.get(start)}")
    assert wrong == []
