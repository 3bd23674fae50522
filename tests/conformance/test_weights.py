"""The bytes of weights are those that vLLM allocates."""

from __future__ import annotations

from functools import cache

import pytest

from gateway.engines.common.layers.build import build
from gateway.engines.common.layers.built_model import BuiltModel, Linear
from gateway.engines.common.layers.weights import linear_bytes, weights_bytes
from gateway.models.rank import Rank
from gateway.models.scheme import Scheme
from tests.conformance import weight_questions
from tests.conformance.golden import pairs
from tests.conformance.layer_cases import TENSOR_PARALLEL, case
from tests.conformance.weight_questions import CAPABILITIES, config
from tests.support.published import TRAITS, model_from_config
from tests.support.versions import since

SLACK = 64  # bytes a matrix


ASKED = [
    (version, capability, model, quant, answer)
    for version in TRAITS
    for capability in CAPABILITIES
    for (model, quant, _), answer in pairs(weight_questions, version, capability)
    if answer
]


@cache
def body_of(model: str, quant: str, traits: tuple[str, ...] = ()) -> BuiltModel:
    return build(model_from_config(config(model, quant), source=model), traits)


def padded_experts(
    layers: tuple[Linear, ...], capability: str, version: str, model: str, tp: int
) -> dict[Linear, tuple[int, int]]:
    """TensorRT-LLM's unquantized experts grow to 128 where it is chosen, which the choice of
    kernels says."""
    if not since(version, "0.33") or (capability, model) != ("10.0", "qwen3-30b-a3b"):
        return {}
    width = -(-768 // tp // 128) * 128
    sizes = {"expert_column": (2048, 2 * width), "expert_row": (width, 2048)}
    plain = Scheme(kind="unquantized", bits=16)
    return {
        layer: sizes[layer.shard] for layer in layers if layer.experts and layer.scheme == plain
    }


@pytest.mark.parametrize(
    ("version", "capability", "model", "quant", "answer"),
    ASKED,
    ids=["-".join(case[:4]) for case in ASKED],
)
def test_bytes_are_those_of_the_engine(
    version: str, capability: str, model: str, quant: str, answer: dict[str, list[int | None]]
) -> None:
    traits = TRAITS[version]
    body = body_of(model, quant, traits)
    other_tensors = {tensor.name.removesuffix(".weight") for tensor in body.other_tensors}
    # One scale a channel is counted for 8-bit integers, also where a checkpoint has one for all.
    loose = 0.01 if quant in ("int8-static", "bitsandbytes-8bit") else 0
    for position, tp in enumerate(TENSOR_PARALLEL):
        total = answer[""][position]
        if total is None:
            continue
        pads = padded_experts(body.linears, capability, version, model, tp)
        planner_bytes: dict[str, int] = {}
        slack: dict[str, float] = {}
        for layer in body.linears:
            size = linear_bytes(layer, Rank(tp=tp, capability=capability), traits, pads.get(layer))
            assert size is not None, (layer.name, tp)
            if quant == "bitsandbytes-4bit":
                size -= size // 9  # scales, which the engine adds while it loads
            planner_bytes[layer.name] = planner_bytes.get(layer.name, 0) + size
            slack[layer.name] = (
                slack.get(layer.name, 0)
                + SLACK * layer.count * max(1, layer.experts)
                + loose * size
            )
        engine_bytes = {
            name: sizes[position] or 0
            for name, sizes in answer.items()
            if name and name not in other_tensors
        }
        assert planner_bytes.keys() == engine_bytes.keys()
        off = {
            name: (size, planner_bytes[name])
            for name, size in engine_bytes.items()
            if abs(size - planner_bytes[name]) > slack[name]
        }
        assert not off, (tp, off)
        if not quant.startswith("bitsandbytes"):
            assert weights_bytes(
                body, Rank(tp=tp, capability=capability), traits, pads
            ) == pytest.approx(total, rel=0.0002 + loose / 2)


def test_golden_answers_cover_enough_totals() -> None:
    totals = [size for *_, answer in ASKED for size in answer[""] if size]
    assert len(totals) >= 1300
    assert len({model for _, _, model, _, _ in ASKED}) >= 20
    assert len({quant for _, _, _, quant, _ in ASKED}) >= 40


def test_experts_are_dealt_whole_with_expert_parallelism() -> None:
    layer = next(
        layer
        for layer in body_of("qwen3-30b-a3b", "none").linears
        if layer.name.endswith("experts.w2")
    )
    expert_bytes = 768 * 2048 * 2 * layer.count
    assert (
        linear_bytes(layer, Rank(tp=8, ep=8))
        == linear_bytes(layer, Rank(tp=1, ep=8))
        == 16 * expert_bytes
    )
    # The first rank has one expert more than the last.
    assert linear_bytes(layer, Rank(tp=8, ep=48)) == 3 * expert_bytes
    assert linear_bytes(layer, Rank(tp=3, ep=3)) == 43 * expert_bytes


def test_online_fp8_halves_quantized_weights() -> None:
    plain = body_of("qwen3-8b", "none")
    online = case("qwen3-8b", "none") | {"quantization_config": {"quant_method": "fp8"}}
    fp8_model = build(model_from_config(online))
    assert [linear_bytes(layer, Rank(tp=2)) for layer in plain.linears] == [
        2 * (linear_bytes(layer, Rank(tp=2)) or 0) for layer in fp8_model.linears
    ]
