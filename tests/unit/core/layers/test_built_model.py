"""One stage of pipeline parallelism: the fullest, for it decides what fits."""

from __future__ import annotations

import pytest

from gateway.core.layers.build import build
from gateway.core.layers.built_model import BuiltModel, stage
from gateway.core.layers.weights import weights_bytes
from gateway.core.model.rank import Rank
from tests.support.published import published


def sizes(name: str, stages: int) -> tuple[BuiltModel, BuiltModel, int, int]:
    whole = build(published(name))
    part = stage(whole, stages)
    return whole, part, weights_bytes(whole, Rank()) or 0, weights_bytes(part, Rank()) or 0


def test_one_stage_is_the_model() -> None:
    whole = build(published("llama-3.1-8b"))
    assert stage(whole, 1) is whole


@pytest.mark.parametrize(("stages", "layers"), [(2, 16), (3, 11), (5, 7), (32, 1)])
def test_layers_are_dealt_out_and_the_fullest_stage_has_the_rest(stages: int, layers: int) -> None:
    part = stage(build(published("llama-3.1-8b")), stages)
    assert {layer.count for layer in part.linears} == {layers}
    assert [group.layers for group in part.attention] == [layers]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "gpt-oss-20b", "gemma-2-9b"])
def test_no_stage_is_smaller_than_its_share_nor_larger_than_the_rest(name: str) -> None:
    _, _, whole, half = sizes(name, 2)
    assert whole / 2 <= half < whole
    _, _, _, quarter = sizes(name, 4)
    assert whole / 4 <= quarter < half


def test_embedding_and_head_are_on_different_stages() -> None:
    whole, part, _, _ = sizes("llama-3.1-8b", 2)
    assert sum(group.shard == "vocab" for group in whole.others) == 2
    assert sum(group.shard == "vocab" for group in part.others) == 1


def test_every_kind_of_layer_of_a_hybrid_is_dealt_out() -> None:
    part = stage(build(published("qwen3-next-80b-a3b")), 2)
    assert {group.kind: group.layers for group in part.attention} == {"recurrent": 18, "full": 6}
