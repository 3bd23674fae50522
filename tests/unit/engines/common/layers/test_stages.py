"""Stages of a pipeline: the contents of each, and the fullest, which decides the size. Whole
models: tests/conformance/test_stages.py."""

from __future__ import annotations

import pytest

from gateway.engines.common.layers.build import build
from gateway.engines.common.layers.built_model import BuiltModel
from gateway.engines.common.layers.stages import (
    field_against_stages,
    parts_of_every_stage,
    split_layers,
    stage,
    stage_model,
)
from gateway.engines.common.layers.weights import weights_bytes
from gateway.engines.registry import engine_kind
from gateway.models.rank import Rank
from gateway.profiles.profiles import Profiles
from tests.support.published import published_model
from tests.support.versions import SGLANG, VLLM

PROFILES = Profiles()
NEWEST = PROFILES.engine(f"vllm=={VLLM[-1]}")
OTHER = PROFILES.engine(f"sglang=={SGLANG[-1]}")
NEWEST_KIND = engine_kind(NEWEST.kind)
OTHER_KIND = engine_kind(OTHER.kind)


def fullest(name: str, stages: int) -> BuiltModel:
    spec = published_model(name)
    return stage(build(spec), NEWEST, NEWEST_KIND, spec.architecture, stages)


def vocabularies(model: BuiltModel) -> int:
    return sum(tensor.shard == "vocab" for tensor in model.other_tensors)


def test_a_single_pipeline_stage_equals_the_model() -> None:
    whole = build(published_model("llama-3.1-8b"))
    assert stage(whole, NEWEST, NEWEST_KIND, "LlamaForCausalLM", 1) is whole


def test_each_engine_gives_remaining_layers_to_its_own_stages() -> None:
    """The lines that both print: 'Hidden layers were unevenly partitioned' of vLLM; the last have
    one more in SGLang."""
    whole = build(published_model("llama-3.1-8b"))
    assert [split_layers(whole, NEWEST_KIND, count) for count in (2, 3, 5)] == [
        (16, 16),
        (11, 11, 10),
        (6, 6, 7, 7, 6),
    ]
    assert [split_layers(whole, OTHER_KIND, count) for count in (2, 3, 5)] == [
        (16, 16),
        (10, 11, 11),
        (6, 6, 6, 7, 7),
    ]


@pytest.mark.parametrize(("stages", "layers"), [(2, 16), (3, 11), (5, 7), (32, 1)])
def test_the_fullest_stage_keeps_as_many_layers_as_any(stages: int, layers: int) -> None:
    assert [group.layers for group in fullest("llama-3.1-8b", stages).attention] == [layers]


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "qwen3-30b-a3b",
        "qwen3-next-80b-a3b",
        "gpt-oss-20b",
        "gemma-2-9b",
        "deepseek-v3",
    ],
)
def test_no_stage_is_smaller_than_its_share_nor_larger_than_the_rest(name: str) -> None:
    whole, half, quarter = (
        weights_bytes(fullest(name, stages), Rank()) or 0 for stages in (1, 2, 4)
    )
    assert whole / 2 <= half < whole
    assert whole / 4 <= quarter < half


def test_outer_stages_hold_embedding_and_head_unless_repeated() -> None:
    whole = build(published_model("llama-3.1-8b"))
    thirds = [stage_model(whole, (11, 11, 10), part, frozenset()) for part in range(3)]
    assert [vocabularies(third) for third in thirds] == [1, 0, 1]
    assert [
        vocabularies(
            stage_model(whole, (11, 11, 10), part, parts_of_every_stage(OTHER, "LlamaForCausalLM"))
        )
        for part in range(3)
    ] == [2, 1, 1]


def test_a_head_that_is_the_embedding_brings_it_to_the_last_stage() -> None:
    whole = build(published_model("llama-3.2-1b"))
    assert [
        vocabularies(stage_model(whole, (6, 5, 5), part, frozenset())) for part in range(3)
    ] == [
        1,
        0,
        1,
    ]


def test_layers_that_differ_are_where_the_model_has_them() -> None:
    """DeepSeek-V3 begins with three dense layers, so its first stage is the smallest."""
    whole = build(published_model("deepseek-v3"))
    first, second = (
        weights_bytes(stage_model(whole, (20, 21, 20), part, frozenset()), Rank()) or 0
        for part in (0, 1)
    )
    assert first < 0.85 * second


def test_a_vision_tower_is_on_the_first_stage_unless_the_engine_repeats_it() -> None:
    whole = build(published_model("qwen2.5-vl-7b"))
    seeing = [
        [group.layers for group in stage_model(whole, (14, 14), part, frozenset()).attention]
        for part in (0, 1)
    ]
    assert seeing == [[14, 32], [14, 0]]
    assert [
        group.layers for group in stage_model(whole, (14, 14), 1, frozenset({"towers"})).attention
    ] == [14, 32]


def test_every_kind_of_layer_of_a_hybrid_is_dealt_out() -> None:
    assert {group.kind: group.layers for group in fullest("qwen3-next-80b-a3b", 2).attention} == {
        "recurrent": 18,
        "full": 6,
    }


@pytest.mark.parametrize("version", VLLM[1:])
def test_layers_that_read_the_inputs_of_the_first_stage_are_not_shared(version: str) -> None:
    """Gemma 4 E4B, whose class makes stages of the 31B, which has none of that."""
    engine = PROFILES.engine(f"vllm=={version}")
    small, large = published_model("gemma-4-e4b"), published_model("gemma-4-31b")
    assert small.architecture == large.architecture
    assert field_against_stages(build(small), engine, small.architecture) == "no_layer_input_stages"
    assert "kv_sharing_target" in engine.sources["no_layer_input_stages"]
    assert field_against_stages(build(large), engine, large.architecture) == ""
