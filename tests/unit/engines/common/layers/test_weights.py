"""The bytes of every layer on one rank, and of the whole model, are those of the parameters that
the engine makes.

Scales of whole tensors, a few bytes a matrix, are left out: hence `SLACK`. The golden answers are
made anew by scripts/engine-answers (tests/conformance/weight_questions.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain import TensorGroup
from gateway.engines.common.layers.build import build
from gateway.engines.common.layers.built_model import BuiltModel, Linear
from gateway.engines.common.layers.weights import (
    NO_GROUP_INDEX,
    linear_bytes,
    other_bytes,
    spread_scale_bytes,
    weights_bytes,
)
from gateway.engines.common.quantization.block import UnknownScheme
from gateway.errors import BadModel
from gateway.models.rank import Rank
from gateway.models.scheme import Scheme
from tests.support.published import CONFIGS, TRAITS, model_from_config


def test_an_uncuttable_or_unknown_layer_has_no_bytes() -> None:
    layer = Linear("o", 2, 96, 64, "row", (64,), Scheme(kind="wna16", bits=4, group=32))
    assert linear_bytes(layer, Rank()) == 2 * (96 * 64 // 2 + 3 * 64 * 2)
    assert linear_bytes(layer, Rank(tp=2)) is None  # half a group
    assert linear_bytes(layer, Rank(tp=7)) is None
    unknown_layer = Linear("o", 2, 96, 64, "row", (64,), UnknownScheme(reason="?"))
    assert linear_bytes(unknown_layer, Rank()) is None
    assert weights_bytes(BuiltModel((layer, unknown_layer), (), ()), Rank()) is None


def test_a_kernel_that_pads_makes_a_layer_larger() -> None:
    layer = Linear(
        "ba",
        1,
        2048,
        32,
        "merged",
        (16, 16),
        Scheme(kind="wna16", bits=4, group=128, layout="gptq"),
    )
    plain, padded_bytes = (
        linear_bytes(layer, Rank(), (NO_GROUP_INDEX,), padded_to=size)
        for size in (None, (2048, 64))
    )
    assert plain is not None
    assert padded_bytes == 2 * plain


@pytest.mark.parametrize(
    ("tensor", "tp", "kv_heads", "expected"),
    [
        (
            TensorGroup(name="e", count=1, shape=(100, 8), dtype="", shard="vocab"),
            4,
            None,
            32 * 8 * 2,
        ),
        (
            TensorGroup(name="n", count=3, shape=(8,), dtype="", shard="replicated"),
            4,
            None,
            3 * 8 * 2,
        ),
        (
            TensorGroup(name="n", count=3, shape=(8,), dtype="F32", shard="column"),
            4,
            None,
            3 * 2 * 4,
        ),
        (TensorGroup(name="n", count=3, shape=(8,), dtype="F32", shard="column"), 4, 2, 3 * 2 * 2),
        (TensorGroup(name="k", count=1, shape=(16, 8), dtype="BF16", shard="kv"), 4, 2, 8 * 8 * 2),
        (TensorGroup(name="q", count=1, shape=(16, 8), dtype="I32", shard="row"), 4, 2, 4 * 8 * 4),
        (TensorGroup(name="b", count=1, shape=(16,), dtype="BF16", shard="row"), 4, 2, 16 * 2),
        (TensorGroup(name="w", count=1, shape=(16, 8), dtype="F8_E4M3", shard="row"), 4, 2, 4 * 8),
    ],
)
def test_other_tensors_have_bytes_by_their_shard(
    tensor: TensorGroup, tp: int, kv_heads: int | None, expected: int
) -> None:
    assert other_bytes(tensor, tp, "bfloat16", kv_heads) == expected


@settings(max_examples=40)
@given(CONFIGS, st.sampled_from([()] + [traits for traits in TRAITS.values() if traits]))
def test_any_config_has_bytes_or_none_or_is_a_bad_model(
    config: dict[str, Any], traits: tuple[str, ...]
) -> None:
    try:
        model = build(model_from_config(config), traits)
    except BadModel:
        return
    whole = weights_bytes(model, Rank(dtype="float16"), traits)
    for tp in (2, 3, 8):
        share = weights_bytes(model, Rank(tp=tp, dtype="float16", capability="9.0"), traits)
        assert share is None or share >= 0
    assert whole is None or whole >= 0


def test_marlin_spreads_the_scales_of_fp8_blocks() -> None:
    """prepare_fp8_layer_for_marlin in vLLM: the scale of a block of 128 x 128 becomes one for each
    of its 128 columns, in 16 bits."""
    scheme = Scheme(kind="fp8_block", bits=8, group=128)
    dense, experts = (
        Linear("down", 3, 1024, 512, "row", (512,), scheme, experts=number) for number in (0, 8)
    )
    model = BuiltModel((dense, experts), (), ())
    growth = 8 * (512 * 2 - 4 * 4)
    assert spread_scale_bytes(model, Rank(), {"down"}) == 3 * growth * (1 + 8)
    assert spread_scale_bytes(model, Rank(), ()) == 0
