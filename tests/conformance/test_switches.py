"""Kernels that engines turn off or on by the model alone are planned so: every model of
tests/models, in formats with several kernels, on one rank."""

from __future__ import annotations

import pytest

from gateway.domain import Plan, RejectedPlan
from tests.conformance import switch_questions
from tests.conformance import test_whole_models as vllm
from tests.conformance.golden import pairs
from tests.conformance.model_cases import config
from tests.conformance.switch_cases import machines
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import model_from_config
from tests.support.versions import VLLM

# 0.18.0 does not know a plain `model.` in the names of this model, which none published has.
ODD_NAMES = {("0.18.0", "mistral-small-3.2-24b", "fp8-block")}


def vllm_plan(version: str, model: str, quant: str, capability: str) -> Plan | RejectedPlan:
    engine = vllm.ENGINES[version]
    spec = model_from_config(config(model, quant))
    decision = decide(
        spec,
        vllm.machine(capability),
        [engine],
        wish(tensor_parallel=1),
        rules=vllm.RULES,
    )
    plain = [plan for plan in decision.plans if plan.cost == 0]
    return plain[0] if plain else decision.rejected[0]


@pytest.mark.parametrize(
    ("version", "capability"),
    [(version, capability) for version in VLLM for capability in machines(version)],
)
def test_every_model_has_the_kernels_that_vllm_takes(version: str, capability: str) -> None:
    wrong: list[object] = []
    count = 0
    for (model, quant), engine_answer in pairs(switch_questions, version, capability):
        plan = vllm_plan(version, model, quant, capability)
        if (version, model, quant) in ODD_NAMES:
            continue
        if engine_answer is None or isinstance(plan, RejectedPlan):
            wrong += (
                [(model, quant, plan)] if (engine_answer is None) is isinstance(plan, Plan) else []
            )
            continue
        count += 1
        layers = vllm.layers_of(model, {"layers": engine_answer}, 0)
        if layers != vllm.layers_ours(plan):
            wrong.append((model, quant, vllm.layers_ours(plan) - layers))
    assert wrong == []
    assert count > 100
