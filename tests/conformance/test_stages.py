"""Stages of a pipeline hold what the engine gives them, also where layers are dealt out unevenly, as plans for unlike GPUs say.

The golden answers are made anew by scripts/engine-answers (tests/conformance/stage_questions.py).
"""

from __future__ import annotations

import pytest

from gateway.core.layers.build import asked, build
from gateway.core.layers.built_model import dealt
from gateway.core.layers.weights import weights_bytes
from gateway.core.model.rank import Rank
from gateway.core.model.spec import read_model
from gateway.core.planner.decide import decide
from gateway.core.variables import STAGES
from gateway.profiles import Profiles
from tests.conformance import stage_questions
from tests.conformance.golden import pairs
from tests.conformance.stage_cases import CAPABILITIES, Stages, config
from tests.support.makers import wish
from tests.support.versions import VLLM

PROFILES = Profiles()
# Of the bytes of weights: norms stand on one stage only.
EXACT = 0.0001


def ours(version: str, one: Stages) -> list[list[int]]:
    """Of each stage the bytes of weights, and its layers."""
    spec = read_model("m", None, config(one.model, one.quant), None, None, (), None)
    engine = PROFILES.engine(f"vllm=={version}")
    built = build(spec, asked(spec, engine.traits))
    rank = Rank(pp=one.count, dtype="float16" if one.quant == "awq" else "bfloat16", capability=CAPABILITIES[0])
    found = []
    for layers in one.layers or (1,) * one.count:
        stage = dealt(built, layers, sum(one.layers) or one.count)
        held = weights_bytes(stage, rank, engine.traits)
        assert held is not None
        found.append([held, sum(group.layers for group in stage.attention)])
    return found


@pytest.mark.parametrize("version", VLLM)
def test_each_stage_holds_what_the_engine_gives_it(version: str) -> None:
    wrong = []
    for one, answer in pairs(stage_questions, version, CAPABILITIES[0]):
        if isinstance(answer, dict):
            whole = config(one.model, one.quant)["num_hidden_layers"]
            assert "does not match num_hidden_layers" in answer["refused"], answer
            assert sum(one.layers) != whole
            continue
        for mine, theirs in zip(ours(version, one), answer, strict=True):
            if mine[1] != theirs[1] or abs(mine[0] / theirs[0] - 1) > EXACT:
                wrong.append(f"{one}: {theirs}, ours {mine}")
    assert wrong == []


def test_plans_for_unlike_gpus_deal_layers_out_in_ways_that_engines_were_asked_about() -> None:
    """The variable is spelled as the engine was given it, and its layers are all that the model has."""
    spec = read_model("m", None, config("seed-oss-36b", "awq"), None, None, (), None)
    engine = PROFILES.engine(f"vllm=={VLLM[-1]}")
    known = {",".join(map(str, one.layers)) for one in stage_questions.questions(VLLM[-1]) if one.model == "seed-oss-36b"}
    machine, rules = PROFILES.hardware("5090+3090"), PROFILES.rules([engine])
    plans = decide(spec, machine, [engine], wish(), rules=rules, gpus=PROFILES.gpus, pace=PROFILES.pace).plans
    dealt_out = [plan for plan in plans if STAGES["vllm"] in plan.env]
    assert dealt_out
    assert all("--pipeline-parallel-size=2" in plan.argv for plan in dealt_out)
    assert {plan.env[STAGES["vllm"]] for plan in dealt_out} & known
