"""Parameters outside of linear layers have the bytes that vLLM builds, family by family."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gateway.domain import TensorGroup
from gateway.engines.common.layers.build import build
from gateway.engines.common.layers.built_model import BuiltModel, rank_shape
from tests.conformance import parameter_questions
from tests.conformance.golden import pairs
from tests.conformance.layer_cases import TENSOR_PARALLEL
from tests.support.published import TRAITS, model_from_config
from tests.support.versions import since, vllm_since

# There it is one of the engine's linear layers with the same contents.
ELSEWHERE = {
    (version, "glm-4.5-air"): "model.layers.*.mlp.gate.weight" for version in vllm_since("0.33")
}


# version, (model, changes to its config, task), the engine's answer
QUESTIONS = [
    (version, question, answer)
    for version in TRAITS
    for question, answer in pairs(parameter_questions, version, "9.0")
    # Before 0.33.0 its own configuration class knows no interval but 4
    # (transformers_utils/configs/qwen3_next.py:253 of 0.18.0).
    if since(version, "0.33") or "full_attention_interval" not in question[1]
]


def rank_bytes(model: BuiltModel, tp: int) -> int | None:
    """Bytes on one rank of a model in bfloat16; None where a layer cannot be cut so."""
    total = sum(other_bytes(group, tp) for group in model.other_tensors)
    for layer in model.linears:
        cut = rank_shape(layer, tp)
        if cut is None:
            return None
        total += layer.count * max(1, layer.experts) * (cut[0] + layer.bias) * cut[1] * 2
    return total


def other_bytes(group: TensorGroup, tp: int) -> int:
    first, *rest = group.shape
    if group.shard == "vocab":
        first = -(-first // 64) * 64
    ranks = 1 if group.shard == "replicated" else tp
    return group.count * first // ranks * math.prod(rest) * (4 if group.dtype == "F32" else 2)


def built_model(question: tuple[str, dict[str, Any], Any], version: str) -> BuiltModel:
    model, changes, task = question
    spec = model_from_config(
        parameter_questions.question_config(model, changes), source=model, task=task
    )
    return build(spec, TRAITS[version])


@pytest.mark.parametrize(("version", "question", "answer"), QUESTIONS)
def test_a_rank_holds_as_many_bytes_as_the_engine_builds(
    version: str, question: Any, answer: dict[str, Any]
) -> None:
    model = built_model(question, version)
    for tp, engine_bytes in zip(TENSOR_PARALLEL, answer["bytes"], strict=True):
        assert rank_bytes(model, tp) == engine_bytes, tp


@pytest.mark.parametrize(("version", "question", "answer"), QUESTIONS)
def test_other_tensors_equal_those_of_the_engine(
    version: str, question: Any, answer: dict[str, Any]
) -> None:
    tensors = {tensor.name: tensor for tensor in built_model(question, version).other_tensors}
    moved_tensors = {ELSEWHERE.get((version, question[0]))}
    assert tensors.keys() - moved_tensors == {name for name, *_ in answer["others"]}
    for name, count, shape, dtype in answer["others"]:
        # The engine pads the vocabulary; here it is padded where bytes are counted.
        rows = (
            -(-tensors[name].shape[0] // 64) * 64
            if tensors[name].shard == "vocab"
            else tensors[name].shape[0]
        )
        assert (
            tensors[name].count,
            [rows, *tensors[name].shape[1:]],
            tensors[name].dtype or "BF16",
        ) == (
            count,
            shape,
            dtype,
        )
