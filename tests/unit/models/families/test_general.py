"""Families that no reader knows: the reading of their fields agrees with readers that know, is
marked as a guess, and yields to answers."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import AskedCache, Decision, EngineAnswer, ModelSpec, Question
from gateway.engines.common.layers.build import build
from gateway.errors import FitserveError
from gateway.models.families import general
from gateway.models.families.blueprint import Blueprint
from gateway.models.families.config import Fields
from gateway.models.families.registry import add_defaults, build_blueprint
from gateway.models.families.text_config import read_text_config
from gateway.models.tensor import Tensor
from gateway.planner.engine_answers import open_questions
from gateway.profiles.profiles import Profiles
from tests.support.makers import wish
from tests.support.paths import MODELS, ROOT
from tests.support.planning import decide
from tests.support.published import CONFIGS, TENSORS, config, model_from_config, tensors
from tests.support.versions import VLLM_REF
from tests.support.yaml_file import read_yaml

PROFILES = Profiles()
# Differences that names of fields cannot tell: sizes and ties that only a family's own defaults
# have, towers by rule of thumb.
APART = {
    "bge-large-en-v1.5": 0.10,
    "bge-m3": 0.45,
    "command-r7b": 0.14,
    "gemma-2-9b": 0.11,
    "gemma-3-1b": 0.31,
    "gemma-3-27b": 0.06,
    "gemma-3-4b": 0.19,
    "gemma-4-26b-a4b": 0.04,
    "gemma-4-31b": 0.03,
    "gemma-4-e4b": 0.40,
    "gte-modernbert-base": 0.14,
    "nomic-embed-text-v1.5": 0.18,
    "qwen2.5-vl-7b": 0.03,
    "qwen3-vl-8b": 0.02,
    "qwen3.5-9b": 0.02,
}
# Windows that only a family's defaults give to layers: all of their tokens are counted.
WINDOWS = {
    "gemma-2-9b",
    "gemma-3-1b",
    "gemma-3-27b",
    "gemma-3-4b",
    "mistral-7b-v0.1",
    "phi-3.5-moe",
    "phi-4-mini",
}
SHAPES: dict[str, dict[str, Any]] = read_yaml(ROOT / "tests/support/family_shapes.yaml")
OTHER_CACHES = {"gemma-4-26b-a4b", "gemma-4-31b", "gemma-4-e4b"}


def guess(fields: dict[str, Any]) -> Blueprint:
    top = Fields(fields, "m")
    text = general.decoder(add_defaults(read_text_config(top).fields), "model")
    around = general.towers(top)
    return Blueprint(
        text.linears,
        text.attention + around.attention,
        text.parameters + around.parameters,
        text.guessed,
    )


def elements(plan: Blueprint) -> int:
    element_count = sum(
        len(item.numbers) * max(1, item.experts) * (item.k + item.bias) * sum(item.parts)
        for item in plan.linears
    )
    return element_count + sum(group.count * math.prod(group.shape) for group in plan.parameters)


def attention_rows(plan: Blueprint) -> list[tuple[Any, ...]]:
    groups = [group for group in plan.attention if group.kind != "vision"]
    return sorted(
        (group.kind, group.layers, group.kv_heads, group.head_dim, group.window or 0)
        for group in groups
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.json")))
def test_names_of_fields_give_the_shapes_of_the_familys_own_reader(name: str) -> None:
    blueprint, guess_of_model = build_blueprint(config(name), "m"), guess(config(name))
    assert elements(guess_of_model) == pytest.approx(
        elements(blueprint), rel=APART.get(name, 0.007)
    )
    if name in WINDOWS:
        layers = {
            kind: sum(group.layers for group in plan.attention if group.kind != "vision")
            for kind, plan in (("k", blueprint), ("g", guess_of_model))
        }
        assert layers["k"] == layers["g"]
        assert all(
            group.kind == "full" for group in guess_of_model.attention if group.kind != "vision"
        )
    elif name not in OTHER_CACHES and blueprint.attention[0].kind != "encoder":
        assert attention_rows(guess_of_model) == attention_rows(blueprint)


def shape(name: str) -> dict[str, Any]:
    """The config.json of a published model of family_shapes.yaml."""
    values = {
        key: value["of"] * value["times"] if isinstance(value, dict) and "times" in value else value
        for key, value in SHAPES[name]["config"].items()
    }
    if "blocks" in SHAPES[name]:
        values["block_configs"] = [
            {
                "attention": {"n_heads_in_group": sharing or None, "no_op": not sharing},
                "ffn": {"ffn_mult": times, "no_op": False},
            }
            for sharing, times in SHAPES[name]["blocks"]
        ]
    return values


@pytest.mark.parametrize("name", SHAPES)
def test_published_models_have_as_many_parameters_as_their_publishers_count(name: str) -> None:
    assert elements(guess(shape(name))) == pytest.approx(SHAPES[name]["billions"] * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "caches"),
    [
        ("nemotron-super-49b", [("full", 49, 8, 128, 0)]),  # of 80 layers
        ("longcat-flash", [("mla", 56, 1, 576, 0)]),  # two in each of 28
        ("lfm2-1.2b", [("full", 6, 8, 64, 0), ("recurrent", 10, 1, 1, 0)]),
    ],
)
def test_layers_with_no_or_two_attentions_keep_their_caches(
    name: str, caches: list[tuple[Any, ...]]
) -> None:
    assert attention_rows(guess(shape(name))) == caches


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"attention": 3, "ffn": []},
        {"ffn": {"ffn_mult": math.nan}},
        {"ffn": {"ffn_mult": 1e300}},
    ],
)
def test_a_block_that_says_nonsense_is_a_layer_without_an_mlp(odd: dict[str, Any]) -> None:
    fields = shape("nemotron-super-49b")
    whole = guess(fields)
    partial_blueprint = guess(fields | {"block_configs": [odd, *fields["block_configs"][1:]]})
    assert sum(group.layers for group in partial_blueprint.attention) == 49
    assert 0 < elements(whole) - elements(partial_blueprint) < 1e9


def unheard(
    name: str = "qwen3-8b", headers: dict[str, Tensor] | None = None, **changes: Any
) -> ModelSpec:
    fields = config(name, model_type="unheard", **changes) | {
        "architectures": ["UnheardForCausalLM"]
    }
    return model_from_config(fields, tensors=headers)


def make_decision(
    spec: ModelSpec,
    answers: dict[Question, EngineAnswer] | None = None,
    *,
    hardware: str = "2x3090",
    listed: bool = True,
    stands_in: bool = False,
    **wishes: Any,
) -> Decision:
    engine = PROFILES.engine(VLLM_REF)
    if listed:
        engine = engine.evolve(architectures=(*engine.architectures, "UnheardForCausalLM"))
    engine = engine.evolve(config_classes=(*engine.config_classes, "unheard"))
    if stands_in:
        engine = engine.evolve(stand_ins=("UnheardForCausalLM",))
    hardware_value, rules = PROFILES.hardware(hardware), PROFILES.rules([engine])
    return decide(spec, hardware_value, [engine], wish(**wishes), rules=rules, answers=answers)


def list_questions(decision: Decision) -> list[Question]:
    """The open questions of the decision."""
    return [question for row in open_questions(decision) for question in row.questions]


SAID = EngineAnswer(
    weights=5 * 10**9,
    kv=AskedCache(
        block_bytes=2**20, reserved_blocks=1, needed=((16, 2**20), (16384, 2**30), (32768, 2**31))
    ),
    source="sha256:0123",
)


def test_a_plan_of_an_unheard_family_names_its_guesses() -> None:
    known_plan = make_decision(model_from_config(config("qwen3-8b"))).plans[0]
    best = make_decision(unheard()).plans[0]
    assert (best.grade, best.verdict) == ("guess", "degraded")
    assert any(
        "its attention, its MLPs are guessed from the names of fields" in words
        for words in best.warnings
    )
    assert best.memory.weights_bytes == pytest.approx(known_plan.memory.weights_bytes, rel=0.001)
    assert best.memory.kv_bytes_per_token == known_plan.memory.kv_bytes_per_token


def test_the_answer_of_an_engine_replaces_the_guess() -> None:
    questions = list_questions(make_decision(unheard()))
    assert questions
    best = make_decision(unheard(), dict.fromkeys(questions, SAID)).plans[0]
    assert (best.grade, best.verdict, best.memory.weights_bytes) == ("checked", "ok", SAID.weights)
    assert not any("guessed" in words for words in best.warnings)


def test_a_guess_that_does_not_fit_is_asked_about_before_it_is_believed() -> None:
    large = unheard(num_hidden_layers=400)
    decision = make_decision(large, tensor_parallel=1)
    assert not decision.plans
    assert decision.rejected[0].verdict == "no_memory"
    questions = list_questions(decision)
    assert questions
    assert make_decision(large, {questions[0]: SAID}, tensor_parallel=1).plans[0].grade == "checked"
    words = EngineAnswer(refusal_text="ValueError: no such layers", source="sha256:0123")
    decision_after = make_decision(large, {questions[0]: words}, tensor_parallel=1)
    assert not decision_after.plans
    assert questions[0] not in list_questions(decision_after)


def test_an_unlisted_architecture_is_refused_unless_the_engine_takes_it() -> None:
    decision = make_decision(unheard(), listed=False, tensor_parallel=1)
    assert [rejection.verdict for rejection in decision.rejected] == ["unsupported_architecture"]
    assert "transformers is unknown: `fitserve plan --check`" in decision.rejected[0].reasons[0]
    questions = list_questions(decision)
    assert questions
    assert (
        make_decision(unheard(), {questions[0]: SAID}, listed=False, tensor_parallel=1)
        .plans[0]
        .grade
        == "checked"
    )
    words = EngineAnswer(refusal_text="ValueError: not supported", source="sha256:0123")
    outcome = make_decision(unheard(), {questions[0]: words}, listed=False, tensor_parallel=1)
    assert (outcome.plans, outcome.rejected[0].reasons) == (
        (),
        ("ValueError: not supported",),
    )
    hostile = unheard().evolve(remote_code=("auto_map in config.json",))
    closed_decision = make_decision(hostile, listed=False)
    assert list_questions(closed_decision) == [], "the class would be the repository's"


def test_an_unlisted_architecture_has_a_plan_by_the_class_of_transformers() -> None:
    best = make_decision(unheard(), listed=False, stands_in=True).plans[0]
    assert best.grade == "guess"
    hostile = unheard().evolve(remote_code=("auto_map in config.json",))
    decision = make_decision(hostile, listed=False, stands_in=True)
    assert not decision.plans, "the class would be the repository's"


def test_a_reader_of_a_family_is_not_used_for_its_transformers_class() -> None:
    fields = config("qwen3-8b", architectures=["UnheardForCausalLM"])
    read = model_from_config(fields)
    assert not read.guessed
    assert not make_decision(read, listed=False, stands_in=True).plans


def test_the_weights_are_those_of_the_headers_where_there_are_any() -> None:
    headers = tensors({f"a.layers.{number}.odd.weight": (4096, 1000) for number in range(4)})
    best = make_decision(unheard(headers=headers), tensor_parallel=1).plans[0]
    assert best.memory.weights_bytes == 4 * 4096 * 1000 * 2


@pytest.mark.parametrize(("method", "plans"), [("torchao", True), ("unheard_method", False)])
def test_a_method_without_rules_is_sized_by_headers_where_the_engine_has_it(
    method: str, *, plans: bool
) -> None:
    headers = tensors(
        {f"model.layers.{number}.mlp.up_proj.weight": (512, 4096) for number in range(36)}, "I8"
    )
    fields = config("qwen3-8b", quantization_config={"quant_method": method})
    decision = make_decision(model_from_config(fields, tensors=headers), tensor_parallel=1)
    assert bool(decision.plans) == plans
    if plans:
        assert decision.plans[0].memory.weights_bytes == 36 * 512 * 4096
    else:
        assert {rejection.verdict for rejection in decision.rejected} == {
            "unsupported_quantization"
        }


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({"layer_types": ["conv", "full_attention"] * 18}, {"recurrent": 18, "full": 18}),
        ({"attn_layer_indices": [0, 9]}, {"recurrent": 34, "full": 2}),
        ({"full_attention_interval": 4}, {"recurrent": 27, "full": 9}),
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, {"recurrent": 32, "full": 4}),
        ({"sliding_window_pattern": "LLLG", "sliding_window": 512}, {"sliding": 27, "full": 9}),
        ({"attention_chunk_size": 8192}, {"sliding": 27, "full": 9}),
        ({"hybrid_layer_pattern": [0, 1] * 18, "sliding_window": 128}, {"sliding": 18, "full": 18}),
        (
            {"linear_attn_config": {"full_attn_layers": [4, 8], "num_heads": 8, "head_dim": 64}},
            {"recurrent": 34, "full": 2},
        ),
        (
            {"mamba_d_state": 128, "mamba_n_heads": 32, "mamba_d_head": 64},
            {"recurrent": 36, "full": 36},
        ),
        ({"kv_lora_rank": 512}, {"mla": 36}),
    ],
)
def test_kinds_of_layers_are_read_from_names_in_published_configs(
    fields: dict[str, Any], groups: dict[str, int]
) -> None:
    assert {group.kind: group.layers for group in unheard(**fields).attention} == groups


def test_delta_attention_has_a_projection_for_each_input_and_a_state_of_its_kind() -> None:
    """The layers of GLM-5.3-Flash: vllm/models/glm5next/common/kda.py of 0.33.0."""
    delta = {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4}
    spec = unheard(linear_attn_config={**delta, "full_attn_layers": [4, 8]})
    (state,) = [group.recurrent for group in spec.attention if group.recurrent]
    assert (state.kind, state.heads, state.rows, state.columns) == ("kda", 64, 128, 128)
    assert (state.conv_channels, state.conv_kernel) == (3 * 8192, 4)
    widths = {
        layer.name.rpartition(".")[2]: layer.n
        for layer in build(spec).linears
        if ".mixer." in layer.name
    }
    inputs = {"q_proj": 8192, "k_proj": 8192, "v_proj": 8192, "b_proj": 64}
    gates = {"f_a_proj": 128, "f_b_proj": 8192, "g_a_proj": 128, "g_b_proj": 8192}
    assert widths == inputs | gates | {"o_proj": unheard().hidden}


def test_latent_heads_may_have_no_rotary_part() -> None:
    """GLM-5.3-Flash publishes `"qk_rope_head_dim": 0`."""
    (group,) = unheard(kv_lora_rank=512, qk_rope_head_dim=0).attention
    assert (group.kind, group.head_dim) == ("mla", 512)


def test_the_text_model_stands_where_configs_put_it_and_a_known_one_is_read_exactly() -> None:
    text = config("qwen3-8b")
    vision = {"depth": 4, "hidden_size": 64, "intermediate_size": 256, "num_heads": 2}
    for outer in (
        {"llm_config": text},
        {"text_config": text},
        {"thinker_config": {"text_config": text}},
    ):
        fields = {"architectures": ["A"], "model_type": "unheard", "vision_config": vision, **outer}
        spec = model_from_config(fields)
        assert spec.guessed == ("its vision tower",)
        assert (spec.hidden, spec.vocab, spec.max_position) == (4096, 151936, 40960)
        assert [(group.kind, group.layers) for group in spec.attention] == [
            ("full", 36),
            ("vision", 4),
        ]
        assert [layer.n for layer in build(spec).linears if layer.name.endswith("qkv_proj")] == [
            6144
        ]


NAMES = st.sampled_from(
    [
        "num_layers",
        "decoder_layers",
        "decoder_attention_heads",
        "ffn_hidden_size",
        "num_dense_layers",
        "moe_layers",
        "moe_layers_enum",
        "mlp_layer_types",
        "attn_layer_period",
        "attn_layer_offset",
        "full_attention_interval",
        "linear_attn_config",
        "hybrid_layer_pattern",
        "attn_type_list",
        "layers_block_type",
        "hybrid_override_pattern",
        "vision_config",
        "audio_config",
        "thinker_config",
        "llm_config",
        "mamba_d_state",
        "head_dim",
        "moe_layer_freq",
        "expert_layer_period",
        "n_shared_experts",
        "v_head_dim",
        "sliding_window",
        "attention_chunk_size",
        "tie_word_embeddings",
    ]
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.just(10**12),
    st.lists(
        st.integers(-1, 40) | st.sampled_from(["mamba", "moe", "full_attention", ""]), max_size=4
    ),
    st.sampled_from(["M*-E", "1,2,x", "LG", ""]),
    st.dictionaries(
        st.sampled_from(
            [
                "hidden_size",
                "num_hidden_layers",
                "depth",
                "full_attn_layers",
                "text_config",
                "num_heads",
            ]
        ),
        st.integers(-1, 99) | st.lists(st.integers(), max_size=3),
        max_size=4,
    ),
)


@given(CONFIGS, st.dictionaries(NAMES, VALUES, max_size=6), st.none() | TENSORS, st.booleans())
def test_any_config_is_read_built_and_planned_or_a_fitserve_error(
    fields: dict[str, Any], more: dict[str, Any], headers: dict[str, Tensor] | None, is_known: bool
) -> None:
    whole = (
        fields
        | more
        | ({} if is_known else {"model_type": "unheard", "architectures": ["UnheardForCausalLM"]})
    )
    with suppress(FitserveError):
        make_decision(model_from_config(whole, tensors=headers))


def test_queries_and_outputs_of_a_lower_rank_are_no_whole_matrices() -> None:
    """Of DeepSeek-V4-Flash, whose 284 billion parameters were 291 with them."""
    sizes = {
        "num_hidden_layers": 43,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
    }
    ranks = {
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "vocab_size": 129280,
        "intermediate_size": 2048,
    }
    guessed_model = guess({"model_type": "unheard-of", **sizes, **ranks})
    layer = {
        linear.name.rpartition(".")[2]: (linear.k, sum(linear.parts))
        for linear in guessed_model.linears
        if ".self_attn." in linear.name
    }
    assert layer == {
        "q_a_proj": (4096, 1024),
        "kv_proj": (4096, 512),
        "q_b_proj": (1024, 64 * 512),
        "o_a_proj": (8 * 512, 8 * 1024),
        "o_b_proj": (8 * 1024, 4096),
    }
    assert [(group.kv_heads, group.head_dim) for group in guessed_model.attention] == [(1, 512)]
