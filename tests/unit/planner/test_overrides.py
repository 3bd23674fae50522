"""Flags of the user that change the model itself: the plan follows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.domain import Decision, Engine, Scalar
from gateway.errors import BadRequest
from gateway.planner.overrides import apply_overrides
from gateway.profiles.profiles import Profiles
from tests.support.makers import machine, wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import VLLM_REF

PROFILES = Profiles()
ENGINE = PROFILES.engine(VLLM_REF)
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


def make_decision(args: Mapping[str, Scalar] = {}, engine: Engine = ENGINE) -> Decision:
    return decide(
        published_model("qwen3-8b"),
        machine("8xh100"),
        [engine],
        wish(tensor_parallel=1, args=args),
        rules=PROFILES.rules([engine]),
        gpus=PROFILES.gpus,
    )


def test_a_language_model_becomes_a_reranker() -> None:
    plain = make_decision().plans[0]
    best = make_decision({"hf-overrides": json.dumps(RERANKER)}).plans[0]
    assert (plain.model.task, best.model.task) == ("generate", "rerank")
    # The output head is not loaded: a 151936 x 4096 matrix in 16 bits.
    assert plain.memory.weights_bytes - best.memory.weights_bytes == 151936 * 4096 * 2


@pytest.mark.parametrize(
    ("args", "task"),
    [
        ({"convert": "embed"}, "embed"),
        ({"runner": "pooling"}, "embed"),
        ({"convert": "classify"}, "classify"),
        ({"--runner": "generate"}, "generate"),
        ({"hf_overrides": '{"architectures": ["Qwen3Model"]}'}, "embed"),
        ({"hf-overrides": "not json"}, "generate"),
    ],
)
def test_flags_change_the_task(args: dict[str, str], task: str) -> None:
    assert apply_overrides(published_model("qwen3-8b"), args).task == task


def test_an_override_changes_the_limit_and_is_its_reason() -> None:
    best = make_decision({"hf-overrides": '{"max_position_embeddings": 8192}'}).plans[0]
    assert best.max_model_len.value == 8192
    assert best.max_model_len.source == "max_position_embeddings in config.json or --hf-overrides"
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}
    longer = apply_overrides(published_model("qwen3-8b"), {"hf-overrides": json.dumps(rope)})
    assert longer.max_position == 2 * 40960


def test_sglang_reads_the_length_beside_a_scaled_rope() -> None:
    """get_context_length multiplies no length that has an original one beside it."""
    engine = PROFILES.engine("sglang==0.5.23")
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40960}

    def context(**config: Any) -> int:
        args: dict[str, Scalar] = {"json-model-override-args": json.dumps(config)}
        return int(make_decision(args, engine).plans[0].max_model_len.value)

    assert context(rope_scaling=rope) == 40960
    assert context(rope_scaling=rope, max_position_embeddings=163840) == 163840


def test_sglang_replaces_only_the_outer_fields() -> None:
    """`update` of a dictionary (get_config in hf_transformers/config.py, 0.5.23)."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40960}
    spec = published_model("qwen3-8b")
    spec = spec.evolve(config={**spec.config, "rope_scaling": rope})
    flag = {"json-model-override-args": '{"rope_scaling": {"factor": 8.0}}'}
    assert apply_overrides(spec, flag).config["rope_scaling"] == {"factor": 8.0}
    # The text model of a nested config has fields of its own.
    nested = published_model("qwen3.5-9b")
    flag = {"json-model-override-args": json.dumps({"rope_scaling": rope})}
    assert apply_overrides(nested, flag) == nested


def test_objects_inside_are_merged() -> None:
    spec = apply_overrides(
        published_model("qwen2.5-vl-7b"), {"hf-overrides": '{"vision_config": {"depth": 2}}'}
    )
    assert spec.config["vision_config"]["depth"] == 2
    assert len(spec.config["vision_config"]) > 1


def test_an_override_that_makes_no_model_is_refused() -> None:
    with pytest.raises(BadRequest, match="--hf-overrides makes no model"):
        apply_overrides(published_model("qwen3-8b"), {"hf-overrides": '{"hidden_size": "wide"}'})


def test_the_engine_converts_the_class_of_another_head() -> None:
    engine = PROFILES.engine(VLLM_REF)
    rules = PROFILES.rules([engine])[VLLM_REF]
    for class_name in ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", "Gemma2Model"):
        assert rules.builds(class_name, engine)
    assert not rules.builds("UnheardForSequenceClassification", engine)
