"""From config.json and headers to a spec, and nothing but BadModel for all else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.domain import Experts, ModelSpec
from gateway.errors import BadModel
from gateway.models.tensor import Tensor
from tests.support.published import (
    CONFIGS,
    TENSORS,
    config,
    model_from_config,
    published_model,
    tensors,
)


def read(
    fields: dict[str, Any], headers: dict[str, Tensor] | None = None, task: Any = None
) -> ModelSpec:
    return model_from_config(fields, tensors=headers, task=task)


ENCODERS: list[dict[str, Any]] = [
    {
        "model_type": name,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
    }
    for name in ("bert", "roberta", "xlm-roberta", "mpnet", "modernbert")
]
ENCODERS += [
    {"model_type": "distilbert", "dim": 32, "n_heads": 4, "n_layers": 2},
    {"model_type": "nomic_bert", "n_embd": 32, "n_head": 4, "n_layer": 2},
]


@pytest.mark.parametrize("fields", ENCODERS, ids=lambda fields: fields["model_type"])
def test_encoders_embed_and_keep_no_kv_cache(fields: dict[str, Any]) -> None:
    spec = read(
        {"architectures": ["A"], "vocab_size": 9, "max_position_embeddings": 514, **fields}, {}
    )
    assert {(group.kind, group.head_dim) for group in spec.attention} == {("encoder", 8)}
    assert sum(group.layers for group in spec.attention) == 2
    assert (spec.task, spec.hidden) == ("embed", 32)


@pytest.mark.parametrize(
    ("family", "longest"), [("bert", 514), ("roberta", 512), ("xlm-roberta", 512)]
)
def test_positions_that_padding_takes_hold_no_text(family: str, longest: int) -> None:
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 9,
    }
    fields |= {
        "architectures": ["A"],
        "model_type": family,
        "max_position_embeddings": 514,
        "intermediate_size": 64,
    }
    assert read(fields, {}).max_position == longest


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_a_decoder_that_embeds_keeps_its_kv_cache(architecture: str) -> None:
    spec = published_model("qwen3-8b", "embed", architectures=[architecture])
    assert (spec.task, [group.kind for group in spec.attention]) == ("embed", ["full"])


SLIDES: list[tuple[dict[str, Any], list[tuple[str, int, int | None]]]] = [
    ({}, [("full", 32, None)]),
    ({"model_type": "mistral", "sliding_window": 4096}, [("sliding", 32, 4096)]),
    ({"model_type": "mistral", "sliding_window": 0}, [("full", 32, None)]),
    ({"model_type": "gemma2", "sliding_window": 4096}, [("full", 16, None), ("sliding", 16, 4096)]),
    (
        {"model_type": "gemma3_text", "sliding_window": 512},
        [("full", 5, None), ("sliding", 27, 512)],
    ),
    (
        {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 4},
        [("full", 8, None), ("sliding", 24, 512)],
    ),
    ({"model_type": "new", "sliding_window": 512}, [("full", 32, None)]),
    (
        {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False},
        [("full", 32, None)],
    ),
    (
        {
            "model_type": "qwen2",
            "sliding_window": 512,
            "use_sliding_window": True,
            "max_window_layers": 0,
        },
        [("sliding", 32, 512)],
    ),
    ({"layer_types": ["full_attention"] * 32, "sliding_window": 512}, [("full", 32, None)]),
    (
        {"layer_types": ["sliding_attention", "attention"] * 16, "sliding_window": 512},
        [("full", 16, None), ("sliding", 16, 512)],
    ),
]


@pytest.mark.parametrize(("changes", "groups"), SLIDES)
def test_sliding_layers_are_those_of_the_engine(
    changes: dict[str, Any], groups: list[tuple[str, int, int | None]]
) -> None:
    spec = read(config("llama-3.1-8b", **changes), {})
    assert [(group.kind, group.layers, group.window) for group in spec.attention] == groups


def test_a_nested_text_model_is_read_as_its_own_family() -> None:
    text = config("mistral-7b-v0.1")
    spec = read(
        {"architectures": ["VisionModel"], "model_type": "mistral3", "text_config": text}, {}
    )
    assert (spec.model_type, spec.attention[0].kind, spec.vocab) == ("mistral3", "sliding", 32000)


@pytest.mark.parametrize(
    ("fields", "stored", "dtype"),
    [
        ({"torch_dtype": "float16"}, "BF16", "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "F32", "bfloat16"),
        ({"torch_dtype": None, "dtype": "float32"}, "BF16", "float32"),
        ({"torch_dtype": None}, "F16", "float16"),
        ({"torch_dtype": "float8_e4m3fn"}, "BF16", "bfloat16"),
        ({"torch_dtype": None}, "I32", "float32"),
    ],
)
def test_the_dtype_comes_from_the_config_or_else_from_the_weights(
    fields: dict[str, Any], stored: str, dtype: str
) -> None:
    assert read(config("llama-3.2-1b", **fields), tensors({"a": (1,)}, stored)).dtype == dtype


def test_the_longest_input_is_the_smallest_limit() -> None:
    assert published_model("llama-3.1-8b").max_position == 131072
    assert published_model("llama-3.1-8b", max_trained_positions=2048).max_position == 2048
    assert published_model("llama-3.1-8b", max_position_embeddings=None).max_position == 2048


@pytest.mark.parametrize(
    ("name", "block", "method"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "gptq"),
        ("compression_config", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ("quantization_config", {"producer": {"name": "modelopt"}, "quantization": {}}, "modelopt"),
    ],
)
def test_quantized_weights_are_seen(name: str, block: dict[str, Any], method: str) -> None:
    spec = published_model("llama-3.2-1b", None, **{name: block})
    assert spec.quant is not None
    assert (spec.quant.method, spec.quant.config) == (method, block)


def test_no_experts_is_a_dense_model_and_one_kv_head_is_multi_query() -> None:
    assert published_model("llama-3.2-1b", num_local_experts=0).experts is None
    assert read(config("llama-3.2-1b", multi_query=True), {}).attention[0].kv_heads == 1


def test_a_hybrid_with_its_tower_is_read_from_its_config_and_from_its_headers() -> None:
    block = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
    }
    fields = config(
        "qwen3.6-35b-a3b",
        quantization_config=block | {"block_name_to_quantize": "model.language_model.layers"},
    )
    layer = "model.language_model.layers"
    headers = tensors(
        {f"{layer}.{number}.linear_attn.in_proj_b.qweight": (256, 32) for number in (0, 1, 2)},
        "I32",
    )
    headers |= tensors(
        {"mtp.fc.weight": (2048, 4096), "model.visual.pos_embed.weight": (2304, 1152)}
    )
    config_spec, read_through = read(fields), read(fields, headers)
    assert [(group.kind, group.layers) for group in config_spec.attention] == [
        ("full", 10),
        ("recurrent", 30),
        ("vision", 27),
    ]
    assert config_spec.experts == Experts(count=256, per_token=8, intermediate=512)
    assert (config_spec.attention, config_spec.experts) == (
        read_through.attention,
        read_through.experts,
    )
    assert (config_spec.tensors_from, config_spec.tensors, read_through.tensors_from) == (
        "config",
        (),
        "headers",
    )
    assert [(group.name, group.count) for group in read_through.tensors] == [
        ("model.language_model.layers.*.linear_attn.in_proj_b.qweight", 3),
        ("model.visual.pos_embed.weight", 1),
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": None}, "no `architectures`"),
    ({"architectures": []}, "no `architectures`"),
    ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'"),
    ({"architectures": ["a\nb"]}, "architectures=a list"),
    ({"architectures": ["\ud800"]}, "architectures=a list"),
    ({"model_type": None}, "no `model_type`"),
    ({"model_type": 7}, "model_type=7"),
    ({"text_config": []}, "text_config=a list"),
    ({"text_config": {"model_type": 7}, "model_type": "qwen3_5"}, "model_type=7"),
    ({"vocab_size": None}, "no `vocab_size`"),
    ({"hidden_size": 0}, "hidden_size=0"),
    ({"hidden_size": -1}, "hidden_size=-1"),
    ({"hidden_size": 2**63}, "hidden_size=9223372036854775808"),
    ({"hidden_size": 10**5000}, "hidden_size=a huge number"),
    ({"hidden_size": 4096.0}, "hidden_size=4096.0"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True"),
    ({"num_attention_heads": "32"}, "num_attention_heads='32'"),
    ({"num_attention_heads": 7, "num_key_value_heads": None}, "7 attention heads"),
    ({"num_key_value_heads": 5}, "5 KV heads"),
    ({"num_key_value_heads": 64}, "64 KV heads"),
    ({"intermediate_size": [1, 2]}, "intermediate_size=a list"),
    ({"layer_types": ["full_attention"]}, "layer_types=a list"),
    ({"layer_types": "full_attention"}, "layer_types='full_attention'"),
    ({"layer_types": ["linear_attention"] * 32}, "linear_attention"),
    ({"layer_types": [["full_attention"]] * 32}, "layer_types of a list"),
    ({"layer_types": ["sliding_attention"] * 32}, "no `sliding_window`"),
    ({"model_type": "mistral", "sliding_window": "4096"}, "sliding_window='4096'"),
    ({"kv_lora_rank": 512}, "kv_lora_rank"),
    ({"mamba_d_state": 16}, "mamba_d_state"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ({"model_type": "mixtral"}, "no `num_local_experts`"),
    ({"model_type": "mixtral", "num_local_experts": 8}, "no `num_experts_per_tok`"),
    ({"quantization_config": {}}, "quant_method"),
    ({"quantization_config": "gptq"}, "quantization_config='gptq'"),
    ({"quantization_config": {"quant_method": "gptq", "x": "\ud800"}}, "plain JSON"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_an_impossible_model_is_refused_by_the_name_of_its_field(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadModel) as error:
        published_model("llama-3.1-8b", **changes)
    assert words in error.value.message
    assert error.value.hint
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "changes", [{"mlp_only_layers": 1}, {"mlp_only_layers": [True]}, {"decoder_sparse_step": 0}]
)
def test_wrong_sparse_layers_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadModel, match=next(iter(changes))):
        published_model("qwen3-30b-a3b", **changes)


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2, -1), (0, 2**63, -5)])
def test_a_shape_of_no_weights_is_refused_by_the_tensor(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadModel, match=r"'x\.weight'"):
        read(config("llama-3.1-8b"), tensors({"x.weight": shape}))


@given(CONFIGS, st.none() | TENSORS, st.sampled_from([None, "generate", "embed"]))
@example(
    config("qwen3-30b-a3b", num_hidden_layers=10**12, mlp_only_layers=[0, -1, 2**70]), None, None
)
def test_any_json_is_a_model_that_can_be_shown_or_a_bad_model(
    fields: dict[str, Any], headers: dict[str, Tensor] | None, task: Any
) -> None:
    refusal: BadModel | None = None
    try:
        spec = read(fields, headers, task)
    except BadModel as error:
        refusal = error
    if refusal:
        assert str(refusal).isprintable()
        assert len(str(refusal)) < 400
        return
    assert ModelSpec.model_validate_json(spec.model_dump_json()).tensors == spec.tensors


def test_more_experts_for_a_token_than_there_are_is_refused() -> None:
    fields = config("qwen3-30b-a3b")
    spec = read(fields)
    assert spec.experts is not None
    assert spec.experts.per_token == 8
    assert read({**fields, "num_experts_per_tok": 128}).experts is not None
    with pytest.raises(BadModel, match="129 experts of 128"):
        read({**fields, "num_experts_per_tok": 129})
