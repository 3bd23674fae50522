"""The layers of a model and their cuts on each rank are those that vLLM builds."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from gateway.engines.common.layers.build import build
from gateway.engines.common.layers.built_model import Linear, rank_shape
from gateway.errors import BadModel
from gateway.models.scheme import Scheme
from gateway.models.tensor import Tensor
from tests.conformance import layer_questions
from tests.conformance.golden import pairs
from tests.conformance.layer_cases import CASES, TENSOR_PARALLEL, case
from tests.support.published import TRAITS, model_from_config
from tests.support.versions import since, vllm_since
from tests.unit.engines.common.layers.test_build import layers_of

ANSWERS: dict[str, dict[tuple[str, str], dict[str, Any]]] = {
    version: dict(pairs(layer_questions, version, "9.0")) for version in TRAITS
}


QUESTIONS = [(version, model, quant) for version in TRAITS for model, quant in CASES]


# The layer computes in float32 and is among those that are not linear here
# (tests/unit/models/test_families.py), a linear layer there.
ELSEWHERE = {(version, "glm-4.5-air"): "model.layers.*.mlp.gate" for version in vllm_since("0.33")}


# Dtypes that the engine's quantization methods compute with.
METHODS = {
    "Unquantized": "unquantized", "GPTQ": "wna16", "AutoGPTQ": "wna16", "AWQ": "wna16",
    "AutoAWQ": "wna16", "INC": "wna16",
    "MoeWNA16": "wna16", "CompressedTensorsWNA16": "wna16", "CompressedTensorsW8A8Int8": "int8",
    "CompressedTensorsW8A8Fp8": "fp8", "Fp8": "fp8", "ModelOptFp8": "fp8", "ModelOptNvFp4": "nvfp4",
    "CompressedTensorsW4A4Fp4": "nvfp4", "CompressedTensorsW4A4Nvfp4": "nvfp4", "Mxfp4": "mxfp4",
    "GptOssMxfp4": "mxfp4",
    "CompressedTensorsW4A4Mxfp4": "mxfp4", "CompressedTensorsW4A16Mxfp4": "mxfp4",
}  # fmt: skip


def method_of(label: str, quant: str) -> str:
    """The kind of scheme that an engine's class name stands for, with bits and group where the
    label has them."""
    name, *numbers = label.split()
    if name == "ModelOptLinearMethod":  # one class for all its algorithms
        return "fp8" if quant == "modelopt-fp8" else "nvfp4"
    best = max((prefix for prefix in METHODS if name.startswith(prefix)), key=len)
    return " ".join([METHODS[best], *numbers])


def kind_of(layer: Linear) -> str:
    assert isinstance(layer.scheme, Scheme), layer
    return "fp8" if layer.scheme.kind.startswith("fp8") else layer.scheme.kind


@pytest.mark.parametrize(("version", "model", "quant"), QUESTIONS, ids=str)
def test_layers_and_their_ranks_equal_those_of_the_engine(
    version: str, model: str, quant: str
) -> None:
    layers = layers_of(case(model, quant), TRAITS[version])
    compared = 0
    for tp in TENSOR_PARALLEL:
        answer = ANSWERS[version][model, quant][str(tp)]
        if isinstance(answer, str):
            continue
        compared += 1
        engine_layers: collections.Counter[tuple[Any, ...]] = collections.Counter()
        for name, count, k, n, label in answer:
            if name != ELSEWHERE.get((version, model)):
                engine_layers[name, k, n, method_of(label, quant).split()[0]] += count
        planner_layers: collections.Counter[tuple[Any, ...]] = collections.Counter()
        for layer in layers:
            planner_layers[layer.name, *(rank_shape(layer, tp) or (0, 0)), kind_of(layer)] += (
                layer.count
            )
        assert planner_layers == engine_layers
    assert compared or (since(version, "0.33") and quant == "gptq-act-order")


@pytest.mark.parametrize(("version", "model", "quant"), QUESTIONS, ids=str)
def test_bits_and_groups_are_those_of_the_engine_where_it_shows_them(
    version: str, model: str, quant: str
) -> None:
    answer = ANSWERS[version][model, quant]["1"]
    if isinstance(answer, str):
        assert quant == "gptq-act-order"
        return
    planner_labels: collections.Counter[tuple[str, str]] = collections.Counter()
    for layer in layers_of(case(model, quant), TRAITS[version]):
        assert isinstance(layer.scheme, Scheme)
        planner_labels[layer.name, f"{layer.scheme.bits} {layer.scheme.group}"] += layer.count
    engine_labels = {
        (name, label.split(" ", 1)[1]): count for name, count, _, _, label in answer if " " in label
    }
    assert {key: planner_labels[key] for key in engine_labels} == engine_labels


@pytest.mark.parametrize(
    ("version", "model"),
    [(version, model) for version, model, quant in QUESTIONS if quant == "none"],
)
def test_a_cut_is_refused_where_the_engine_refuses_it(version: str, model: str) -> None:
    layers = layers_of(case(model, "none"))
    for tp in TENSOR_PARALLEL:
        is_refused = any(rank_shape(layer, tp) is None for layer in layers)
        assert is_refused is isinstance(ANSWERS[version][model, "none"][str(tp)], str), tp


def test_golden_answers_cover_enough_models() -> None:
    count = sum(
        isinstance(answer, list)
        for answers in ANSWERS.values()
        for case in answers.values()
        for answer in case.values()
    )
    assert count >= 780
    assert len({model for model, _ in CASES}) >= 19


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("qwen3-next-80b-a3b", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3-30b-a3b", {"mlp_only_layers": ["a"]}, "mlp_only_layers"),
    ],
)
def test_broken_lists_of_layers_are_refused(
    model: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadModel, match=message):
        layers_of(case(model, "none") | changes)


@pytest.mark.parametrize("quant", ["gptq", "awq"])
def test_the_headers_of_a_packed_checkpoint_say_which_layers_are(quant: str) -> None:
    config = case("llama-3.1-8b", quant)
    for silent in ("modules_in_block_to_quantize", "modules_to_not_convert"):
        config["quantization_config"] = {
            key: value for key, value in config["quantization_config"].items() if key != silent
        }
    headers = {
        f"model.layers.{number}.{module}": Tensor(dtype, (8, 8))
        for number in range(32)
        for module, dtype in (
            ("mlp.down_proj.qweight", "I32"),
            ("mlp.up_proj.weight", "BF16"),
            ("mlp.gate_proj.weight", "BF16"),
        )
    }
    spec = model_from_config(config, tensors=headers)
    kinds = {layer.name.rpartition(".")[2]: kind_of(layer) for layer in build(spec).linears}
    assert (kinds["down_proj"], kinds["gate_up_proj"], kinds["qkv_proj"]) == (
        "wna16",
        "unquantized",
        "unquantized",
    )
    assumed = {kind_of(layer) for layer in build(spec.evolve(tensors_from="config")).linears}
    assert assumed == {"wna16"}
