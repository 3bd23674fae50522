"""Ranks hold the contents that the engines give them where groups of ranks have requests of their
own and share the experts.

The golden answers are made anew by scripts/engine-answers (tests/conformance/group_questions.py,
sglang_group_questions.py).
"""

from __future__ import annotations

from types import ModuleType

import pytest

from gateway.engines.common.layers.build import build, relevant_traits
from gateway.engines.common.layers.weights import weights_bytes
from gateway.engines.common.variant import Variant
from gateway.models.experts import expert_traits
from gateway.planner.layer_kernels import layer_kernels
from gateway.profiles.profiles import Profiles
from tests.conformance import group_questions, sglang_group_questions
from tests.conformance.golden import engine_of, pairs
from tests.conformance.group_cases import CAPABILITIES, Groups
from tests.conformance.layer_cases import case
from tests.support.published import model_from_config
from tests.support.versions import SGLANG, VLLM

PROFILES = Profiles()
ASKED = [
    (module, version)
    for module, versions in ((group_questions, VLLM), (sglang_group_questions, SGLANG))
    for version in versions
]
# The share of the bytes of weights. SGLang cuts layers without experts, and the output, by the
# ranks of all groups, which these forecasts do not: they are too high, never too low.
OVER = {"vllm": 0.0001, "sglang": 0.25}


def forecast(ref: str, group: Groups) -> tuple[int, set[str]]:
    """Bytes of weights of one rank, and the kernels of its experts."""
    spec = model_from_config(case(group.model, group.quant))
    engine = PROFILES.engine(ref)
    model = build(spec, relevant_traits(spec, engine.traits))
    rank = Variant(tp=group.tp, dp=group.dp, ep=group.whole).rank("bfloat16", CAPABILITIES[0])
    rank_bytes = weights_bytes(model, rank, engine.traits)
    assert rank_bytes is not None
    rules = PROFILES.rules([engine])[ref]
    rows = layer_kernels(
        model.linears, rules, rank.computing, experts=expert_traits(spec, is_online=False)
    )
    experts = [layer.name for layer in model.linears if layer.experts]
    return rank_bytes, {
        (row.kernel or "").rpartition(" ")[2] for row in rows if row.layer in experts
    }


@pytest.mark.parametrize(("module", "version"), ASKED)
def test_ranks_hold_the_weights_of_the_engine(module: ModuleType, version: str) -> None:
    kind = engine_of(module)
    for group_case, answer in pairs(module, version, CAPABILITIES[0]):
        if "refused" in answer:
            continue
        forecast_bytes, kernels = forecast(f"{kind}=={version}", group_case)
        assert answer["weights"] * 0.9999 <= forecast_bytes, group_case
        assert forecast_bytes <= answer["weights"] * (1 + OVER[kind]), group_case
        expert_names = {expert.rpartition(" ")[0] for expert in answer["experts"]}
        # SGLang's rules do not describe every kernel.
        assert expert_names <= kernels or kernels == {""}, (group_case, kernels)
