"""Stages of a pipeline hold the layers that the engines give them, also where layers are dealt out
unevenly, as plans for unlike GPUs say.

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
    parts_of_every_stage,
    split_layers,
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
# The share of the bytes of weights: norms stand on one stage only. SGLang's own layers are rounded
# elsewhere too.
EXACT = {"vllm": 0.0001, "sglang": 0.001}
# Whole, these differ as much: test_sglang_whole_models.py.
WHOLE = {"gemma-4-31b none", "qwen3.5-9b none", "qwen3.6-35b-a3b none", "gpt-oss-20b mxfp4"}
# The engine's answer about a model that it would serve without stages.
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


def spec_of(stages: Stages) -> ModelSpec:
    return model_from_config(case(stages.model, stages.quant))


def planner_stages(ref: str, stages: Stages) -> list[list[int]] | None:
    """Of each stage the bytes of weights, and its layers; None: the planner makes no stages of
    it."""
    spec, engine = spec_of(stages), PROFILES.engine(ref)
    model = build(spec, relevant_traits(spec, engine.traits))
    whole = parts_of_every_stage(engine, spec.architecture)
    if field_against_stages(model, engine, spec.architecture):
        return None
    rank = Rank(
        pp=stages.count,
        dtype="float16" if stages.quant == "awq" else "bfloat16",
        capability=CAPABILITIES[0],
    )
    layers = stages.layers or split_layers(model, engine_kind(engine.kind), stages.count)
    parts = []
    for part in range(stages.count):
        stage = stage_model(model, layers, part, whole)
        stage_bytes = weights_bytes(stage, rank, engine.traits)
        assert stage_bytes is not None
        parts.append([stage_bytes, sum(group.layers for group in stage.attention)])
    return parts


def differences(module: ModuleType, version: str) -> list[str]:
    wrong, kind = [], engine_of(module)
    for stage_case, answer in pairs(module, version, CAPABILITIES[0]):
        planner_parts = planner_stages(f"{kind}=={version}", stage_case)
        if isinstance(answer, dict):
            wrong += (
                [f"{stage_case}: {answer['refused']}"]
                if planner_parts and about_stages(stage_case, answer["refused"])
                else []
            )
        elif planner_parts is None:
            wrong += (
                []
                if headless(stage_case, answer)
                else [f"{stage_case}: {answer}, and the planner makes no stages of it"]
            )
        elif (
            kind,
            version,
            stage_case.model,
        ) not in STAND_INS and f"{stage_case.model} {stage_case.quant}" not in (
            WHOLE if kind == "sglang" else ()
        ):
            for part, (planner_part, engine_part) in enumerate(
                zip(planner_parts, answer, strict=True)
            ):
                is_unseen = kind == "sglang" or stage_case.model in TOWERS_UNSEEN
                engine_bytes: Any = [
                    engine_part if kind == "sglang" else engine_part[0],
                    planner_part[1] if is_unseen else engine_part[1],
                ]
                if (
                    planner_part[1] != engine_bytes[1]
                    or abs(planner_part[0] / engine_bytes[0] - 1) > EXACT[kind]
                ):
                    wrong.append(
                        f"{stage_case}, stage {part}: {engine_bytes}, ours {planner_part},"
                        f" {planner_part[0] / engine_bytes[0] - 1:+.2%}"
                    )
    return wrong


def about_stages(stages: Stages, words: str) -> bool:
    if "does not match num_hidden_layers" in words:
        return bool(sum(stages.layers) == spec_of(stages).config["num_hidden_layers"])
    return any(word in words for word in ABOUT_STAGES)


def headless(stages: Stages, weights: list[int]) -> bool:
    """Nothing on the last stage makes logits: it is not a vocabulary larger than the one
    between."""
    spec = spec_of(stages)
    return weights[-1] - weights[1] < 2 * spec.vocab * spec.hidden


@pytest.mark.parametrize(
    ("module", "version"),
    ASKED,
    ids=lambda part: part if isinstance(part, str) else engine_of(part),
)
def test_each_stage_holds_the_layers_of_the_engine(module: ModuleType, version: str) -> None:
    assert differences(module, version) == []


@pytest.mark.parametrize(
    ("module", "version"),
    CLASSES,
    ids=lambda part: part if isinstance(part, str) else engine_of(part),
)
def test_no_class_without_stages_is_planned_with_stages(module: ModuleType, version: str) -> None:
    """All that the version has were asked, not only those of tests/models; a model that has stages
    and is not planned with them was refused otherwise."""
    engine = PROFILES.engine(f"{engine_of(module)}=={version}")
    answers_by_case = dict(pairs(module, version, module.CAPABILITIES[0]))
    assert sum(answer is True for answer in answers_by_case.values()) >= 50
    architectures = {
        spec_of(case).architecture
        for asker, asker_version in ASKED
        if (engine_of(asker), asker_version) == (engine.kind, version)
        for case, answer in pairs(asker, version, CAPABILITIES[0])
        if isinstance(answer, dict)
    }
    without = {architecture for architecture, answer in answers_by_case.items() if answer is False}
    assert without <= set(engine.no_stages) <= without | architectures


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
        speed_knowledge=PROFILES.speed_knowledge,
    ).plans
    dealt_out = [plan for plan in plans if stage_layers in plan.env]
    assert dealt_out
    assert all("--pipeline-parallel-size=2" in plan.argv for plan in dealt_out)
    assert {plan.env[stage_layers] for plan in dealt_out} & joins
