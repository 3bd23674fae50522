"""The linear layers of every known family are those that the engine's own model classes build, on every rank.

The golden answers are regenerated, for one version, by
    PYTHON -m tests.conformance.engine --sources FOLDER --version 0.33.0 --capability 9.0 tests.conformance.layer_questions \
        > tests/conformance/golden/layers-vllm-0.33.0.json
with a Python that can import the engine's sources (see tests/conformance/engine).
"""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from gateway.core.layers import WHOLE_GATES, Linear, body, per_rank
from gateway.core.linear import Scheme
from gateway.core.reading import Tensor, read_model
from gateway.errors import BadModel
from tests.conformance.layer_cases import CASES, TENSOR_PARALLEL, case
from tests.published import CONFIGS, TRAITS

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parent / "conformance" / "golden"
ANSWERS: dict[str, dict[str, dict[str, Any]]] = {
    version: json.loads((GOLDEN / f"layers-vllm-{version}.json").read_text()) for version in TRAITS
}
QUESTIONS = [(version, model, quant) for version in TRAITS for model, quant in CASES]
# It computes in float32 and is among what is not linear here (tests/test_families.py), a linear layer there.
ELSEWHERE = {("0.33.0", "glm-4.5-air"): "model.layers.*.mlp.gate"}
# What the engine's quantization methods compute with.
METHODS = {
    "Unquantized": "unquantized", "GPTQ": "wna16", "AutoGPTQ": "wna16", "AWQ": "wna16", "AutoAWQ": "wna16", "INC": "wna16",
    "MoeWNA16": "wna16", "CompressedTensorsWNA16": "wna16", "CompressedTensorsW8A8Int8": "int8",
    "CompressedTensorsW8A8Fp8": "fp8", "Fp8": "fp8", "ModelOptFp8": "fp8", "ModelOptNvFp4": "nvfp4",
    "CompressedTensorsW4A4Fp4": "nvfp4", "CompressedTensorsW4A4Nvfp4": "nvfp4", "Mxfp4": "mxfp4", "GptOssMxfp4": "mxfp4",
    "CompressedTensorsW4A4Mxfp4": "mxfp4", "CompressedTensorsW4A16Mxfp4": "mxfp4",
}  # fmt: skip


def method_of(label: str, quant: str) -> str:
    """The kind of scheme that an engine's class name stands for, with bits and group where the label has them."""
    name, *numbers = label.split()
    if name == "ModelOptLinearMethod":  # one class for all its algorithms
        return "fp8" if quant == "modelopt-fp8" else "nvfp4"
    best = max((prefix for prefix in METHODS if name.startswith(prefix)), key=len)
    return " ".join([METHODS[best], *numbers])


def layers_of(config: dict[str, Any], traits: tuple[str, ...] = ()) -> tuple[Linear, ...]:
    """From the config alone."""
    return body(read_model("m", None, config, None, None, (), None), traits).linears


def kind_of(layer: Linear) -> str:
    assert isinstance(layer.scheme, Scheme), layer
    return "fp8" if layer.scheme.kind.startswith("fp8") else layer.scheme.kind


@pytest.mark.parametrize(("version", "model", "quant"), QUESTIONS, ids=str)
def test_layers_and_their_ranks_are_what_the_engine_builds(version: str, model: str, quant: str) -> None:
    layers = layers_of(case(model, quant), TRAITS[version])
    compared = 0
    for tp in TENSOR_PARALLEL:
        answer = ANSWERS[version][f"{model} {quant}"][str(tp)]
        if isinstance(answer, str):
            continue
        compared += 1
        built: collections.Counter[tuple[Any, ...]] = collections.Counter()
        for name, count, k, n, label in answer:
            if name != ELSEWHERE.get((version, model)):
                built[name, k, n, method_of(label, quant).split()[0]] += count
        ours: collections.Counter[tuple[Any, ...]] = collections.Counter()
        for layer in layers:
            ours[layer.name, *(per_rank(layer, tp) or (0, 0)), kind_of(layer)] += layer.count
        assert ours == built
    assert compared or (version, quant) == ("0.33.0", "gptq-act-order")


@pytest.mark.parametrize(("version", "model", "quant"), QUESTIONS, ids=str)
def test_bits_and_groups_are_those_of_the_engine_where_it_shows_them(version: str, model: str, quant: str) -> None:
    answer = ANSWERS[version][f"{model} {quant}"]["1"]
    if isinstance(answer, str):
        assert quant == "gptq-act-order"
        return
    ours: collections.Counter[tuple[str, str]] = collections.Counter()
    for layer in layers_of(case(model, quant), TRAITS[version]):
        assert isinstance(layer.scheme, Scheme)
        ours[layer.name, f"{layer.scheme.bits} {layer.scheme.group}"] += layer.count
    shown = {(name, label.split(" ", 1)[1]): count for name, count, _, _, label in answer if " " in label}
    assert {key: ours[key] for key in shown} == shown


@pytest.mark.parametrize(("version", "model"), [(version, model) for version, model, quant in QUESTIONS if quant == "none"])
def test_a_cut_is_refused_where_the_engine_refuses_it(version: str, model: str) -> None:
    layers = layers_of(case(model, "none"))
    for tp in TENSOR_PARALLEL:
        refused = any(per_rank(layer, tp) is None for layer in layers)
        assert refused is isinstance(ANSWERS[version][f"{model} none"][str(tp)], str), tp


def test_the_golden_answers_cover_what_they_should() -> None:
    compared = sum(
        isinstance(answer, list) for answers in ANSWERS.values() for case in answers.values() for answer in case.values()
    )
    assert compared >= 780
    assert len({model for model, _ in CASES}) >= 19


def test_the_gates_of_a_packed_delta_net_are_too_narrow_for_two_ranks_and_kept_whole_later() -> None:
    config = case("qwen3.6-35b-a3b", "auto-round-language")
    name = "language_model.model.layers.*.linear_attn.in_proj_ba"
    cut = next(layer for layer in layers_of(config) if layer.name == name)
    whole = next(layer for layer in layers_of(config, (WHOLE_GATES,)) if layer.name == name)
    assert (cut.count, cut.scheme, per_rank(cut, 1)) == (30, Scheme(kind="wna16", bits=4, group=128, layout="gptq"), (2048, 64))
    assert (per_rank(cut, 2), per_rank(whole, 2)) == ((2048, 32), (2048, 64))


def test_key_and_value_heads_repeat_where_there_are_more_ranks() -> None:
    layer = Linear("q", 1, 8, 96, "qkv", (64, 16, 16), Scheme(kind="unquantized"), heads=8, kv_heads=2)
    assert [per_rank(layer, tp) for tp in (1, 2, 4, 8, 3)] == [(8, 96), (8, 48), (8, 32), (8, 24), None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "unheard"}, "family unheard"),
        ({"text_config": {"model_type": "llama"}}, "family llama"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": None}, "no `hidden_size`"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], message: str) -> None:
    config = {name: value for name, value in (case("llama-3.1-8b", "none") | changes).items() if value is not None}
    with pytest.raises(BadModel, match=message):
        layers_of(config)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("qwen3-next-80b-a3b", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3-30b-a3b", {"mlp_only_layers": ["a"]}, "mlp_only_layers"),
    ],
)
def test_broken_lists_of_layers_are_refused(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadModel, match=message):
        layers_of(case(model, "none") | changes)


def test_layers_without_experts_have_plain_mlps() -> None:
    config = case("qwen3-30b-a3b", "none") | {"mlp_only_layers": [0, 1]}
    counts = {layer.name: layer.count for layer in layers_of(config)}
    assert (counts["model.layers.*.mlp.gate_up_proj"], counts["model.layers.*.mlp.experts.w2"]) == (2, 46)


@pytest.mark.parametrize("quant", ["gptq", "awq"])
def test_the_headers_of_a_packed_checkpoint_say_which_layers_are(quant: str) -> None:
    config = case("llama-3.1-8b", quant)
    for silent in ("modules_in_block_to_quantize", "modules_to_not_convert"):
        config["quantization_config"] = {key: value for key, value in config["quantization_config"].items() if key != silent}
    headers = {
        f"model.layers.{number}.{module}": Tensor(dtype, (8, 8))
        for number in range(32)
        for module, dtype in (
            ("mlp.down_proj.qweight", "I32"),
            ("mlp.up_proj.weight", "BF16"),
            ("mlp.gate_proj.weight", "BF16"),
        )
    }
    spec = read_model("m", None, config, headers, None, (), None)
    kinds = {layer.name.rpartition(".")[2]: kind_of(layer) for layer in body(spec).linears}
    assert (kinds["down_proj"], kinds["gate_up_proj"], kinds["qkv_proj"]) == ("wna16", "unquantized", "unquantized")
    assumed = {kind_of(layer) for layer in body(spec.evolve(tensors_from="config")).linears}
    assert assumed == {"wna16"}


@settings(max_examples=150)
@given(CONFIGS)
def test_any_config_gives_layers_or_a_bad_model(config: dict[str, Any]) -> None:
    try:
        layers = layers_of(config)
    except BadModel:
        return
    for layer in layers:
        for tp in (1, 2, 3, 8):
            rank = per_rank(layer, tp)
            assert rank is None or min(rank) >= 1
