"""Numbers of parameters, as their publishers tell them."""

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.domain import ModelSpec
from gateway.domain.model import Quant, TensorGroup
from gateway.models.parameters import parameter_count

Rows = Sequence[tuple[str, tuple[int, ...], str]]


def spec(rows: Rows, quant: Quant | None = None) -> ModelSpec:
    tensors = tuple(
        TensorGroup(name=name, count=2, shape=shape, dtype=dtype, shard="replicated")
        for name, shape, dtype in rows
    )
    return ModelSpec(
        source="m",
        architecture="LlamaForCausalLM",
        model_type="llama",
        dtype="bfloat16",
        max_position=1,
        hidden=1,
        vocab=1,
        attention=(),
        quant=quant,
        tensors=tensors,
        tensors_from="headers",
    )


@pytest.mark.parametrize(
    ("rows", "quant"),
    [
        ([("a.weight", (64, 32), "BF16"), ("position_ids", (1, 512), "I64")], None),
        (
            [("a.weight", (64, 32), "F8_E4M3"), ("a.weight_scale_inv", (1, 1), "F32")],
            {"method": "fp8"},
        ),
        (
            [
                ("a.qweight", (8, 32), "I32"),
                ("a.qzeros", (1, 4), "I32"),
                ("a.scales", (1, 9), "F16"),
            ],
            {"method": "gptq", "config": {"bits": 4}},
        ),
        (
            [("a.weight_packed", (64, 8), "I32"), ("a.weight_scale", (64, 1), "BF16")],
            {
                "method": "compressed-tensors",
                "config": {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            },
        ),
        (
            [("a.weight", (64, 16), "U8"), ("a.weight_scale", (64, 2), "F8_E4M3")],
            {"method": "modelopt"},
        ),
    ],
)
def test_packed_numbers_are_counted_singly(rows: Rows, quant: dict[str, Any] | None) -> None:
    block = Quant.model_validate(quant) if quant is not None else None
    assert parameter_count(spec(rows, block)) == 2 * 64 * 32


def test_a_packing_that_no_file_describes_is_unknown() -> None:
    rows = [("a.weight", (64, 32), "BF16"), ("b.qweight", (8, 32), "I32")]
    assert parameter_count(spec(rows, Quant(method="other"))) is None
