"""Stages of a pipeline hold what the engines give them, also where layers are dealt out unevenly,
as plans for unlike GPUs say.

The golden answers are made anew by scripts/engine-answers (tests/conformance/stage_questions.py,
sglang_stage_questions.py).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from gateway.domain import ModelSpec
from gateway.engines.common.layers.build import build, relevant_traits
from gateway.engines.common.layers.stages import (
    field_against_stages,
    layers_of,
    parts_of_every_stage,
    stage_model,
)
from gateway.engines.common.layers.weights import weights_bytes
from gateway.engines.registry import engine_kind
from gateway.models.rank import Rank
from gateway.profiles.profiles import Profiles
from tests.conformance import (
    pipeline_questions,
    sglang_pipeline_questions,
    sglang_stage_questions,
    stage_questions,
)
from tests.conformance.golden import engine_of, pairs
from tests.conformance.layer_cases import case
from tests.conformance.stage_cases import CAPABILITIES, Stages
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import model_from_config
from tests.support.versions import SGLANG, VLLM

PROFILES = Profiles()
ASKED = [
    (module, version)
    for module, versions in ((stage_questions, VLLM), (sglang_stage_questions, SGLANG))
    for version in versions
]
CLASSES = [
    (module, version)
    for module, versions in ((pipeline_questions, VLLM), (sglang_pipeline_questions, SGLANG))
    for version in versions
]
# Of the bytes of weights: norms stand on one stage only. SGLang's own layers are rounded elsewhere
# too.
EXACT = {"vllm": 0.0001, "sglang": 0.001}
# Whole, these differ as much: test_sglang_whole_models.py.
WHOLE = {"gemma-4-31b none", "qwen3.5-9b none", "qwen3.6-35b-a3b none", "gpt-oss-20b mxfp4"}
# What an engine says of a model that it would serve without stages.
ABOUT_STAGES = (
    "ipeline",
    "pp_group",
    "PPMissingLayer",
    "KV sharing target",
    "per-layer-input",
    "No model architectures",
)
# These versions lack the class, and transformers' own has the second embedding on every stage.
STAND_INS = {("vllm", "0.18.0", "gemma-4-e4b"), ("sglang", "0.5.10.post1", "gemma-4-e4b")}
# vLLM 0.18.0 has no layers for the attention of its tower, as later versions do.
TOWERS_UNSEEN = {"mistral-small-3.2-24b"}


def spec_of(one: Stages) -> ModelSpec:
    return model_from_config(case(one.model, one.quant))


def ours(ref: str, one: Stages) -> list[list[int]] | None:
    """Of each stage the bytes of weights, and its layers; None: the planner makes no stages of
    it."""
    spec, engine = spec_of(one), PROFILES.engine(ref)
    built, whole = (
        build(spec, relevant_traits(spec, engine.traits)),
        parts_of_every_stage(engine, spec.architecture),
    )
    if field_against_stages(built, engine, spec.architecture):
        return None
    rank = Rank(
        pp=one.count,
        dtype="float16" if one.quant == "awq" else "bfloat16",
        capability=CAPABILITIES[0],
    )
    layers = one.layers or layers_of(built, engine_kind(engine.kind), one.count)
    found = []
    for part in range(one.count):
        stage = stage_model(built, layers, part, whole)
        held_weights_bytes = weights_bytes(stage, rank, engine.traits)
        assert held_weights_bytes is not None
        found.append([held_weights_bytes, sum(group.layers for group in stage.attention)])
    return found


def differences(module: ModuleType, version: str) -> list[str]:
    wrong, kind = [], engine_of(module)
    for one, answer in pairs(module, version, CAPABILITIES[0]):
        mine = ours(f"{kind}=={version}", one)
        if isinstance(answer, dict):
            wrong += (
                [f"{one}: {answer['refused']}"]
                if mine and about_stages(one, answer["refused"])
                else []
            )
        elif mine is None:
            wrong += (
                []
                if headless(one, answer)
                else [f"{one}: {answer}, and the planner makes no stages of it"]
            )
        elif (kind, version, one.model) not in STAND_INS and f"{one.model} {one.quant}" not in (
            WHOLE if kind == "sglang" else ()
        ):
            for part, (own, said) in enumerate(zip(mine, answer, strict=True)):
                unseen = kind == "sglang" or one.model in TOWERS_UNSEEN
                theirs: Any = [said if kind == "sglang" else said[0], own[1] if unseen else said[1]]
                if own[1] != theirs[1] or abs(own[0] / theirs[0] - 1) > EXACT[kind]:
                    wrong.append(
                        f"{one}, stage {part}: {theirs}, ours {own}, {own[0] / theirs[0] - 1:+.2%}"
                    )
    return wrong


def about_stages(one: Stages, words: str) -> bool:
    if "does not match num_hidden_layers" in words:
        return bool(sum(one.layers) == spec_of(one).config["num_hidden_layers"])
    return any(word in words for word in ABOUT_STAGES)


def headless(one: Stages, weights: list[int]) -> bool:
    """Nothing on the last stage makes logits: it is not a vocabulary larger than the one
    between."""
    spec = spec_of(one)
    return weights[-1] - weights[1] < 2 * spec.vocab * spec.hidden


@pytest.mark.parametrize(
    ("module", "version"),
    ASKED,
    ids=lambda part: part if isinstance(part, str) else engine_of(part),
)
def test_each_stage_holds_what_the_engine_gives_it(module: ModuleType, version: str) -> None:
    assert differences(module, version) == []


@pytest.mark.parametrize(
    ("module", "version"),
    CLASSES,
    ids=lambda part: part if isinstance(part, str) else engine_of(part),
)
def test_no_class_without_stages_is_planned_with_stages(module: ModuleType, version: str) -> None:
    """All that the version has were asked, not only those of tests/models; what has stages and is
    not planned with them was refused otherwise."""
    engine = PROFILES.engine(f"{engine_of(module)}=={version}")
    told = dict(pairs(module, version, module.CAPABILITIES[0]))
    assert sum(answer is True for answer in told.values()) >= 50
    refused = {
        spec_of(one).architecture
        for asker, asked_of in ASKED
        if (engine_of(asker), asked_of) == (engine.kind, version)
        for one, answer in pairs(asker, version, CAPABILITIES[0])
        if isinstance(answer, dict)
    }
    without = {architecture for architecture, answer in told.items() if answer is False}
    assert without <= set(engine.no_stages) <= without | refused


def test_stages_of_unlike_gpus_are_among_the_asked_ones() -> None:
    """The variable is spelled as the engine was given it, and its layers are all that the model
    has."""
    spec = model_from_config(case("seed-oss-36b", "awq"))
    engine = PROFILES.engine(f"vllm=={VLLM[-1]}")
    joins = {
        ",".join(map(str, question.layers))
        for question in stage_questions.questions(VLLM[-1])
        if question.model == "seed-oss-36b"
    }
    stage_layers = stage_questions.STAGE_LAYERS
    machine, rules = PROFILES.hardware("5090+3090"), PROFILES.rules([engine])
    plans = decide(
        spec,
        machine,
        [engine],
        wish(text_only=True),
        rules=rules,
        gpus=PROFILES.gpus,
        pace=PROFILES.pace,
    ).plans
    dealt_out = [plan for plan in plans if stage_layers in plan.env]
    assert dealt_out
    assert all("--pipeline-parallel-size=2" in plan.argv for plan in dealt_out)
    assert {plan.env[stage_layers] for plan in dealt_out} & joins
