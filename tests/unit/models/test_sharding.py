"""The weights of a model: config.json and headers say the same, and each weight is cut as the
engine cuts it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import ModelSpec
from gateway.engines.common.layers.build import build
from gateway.engines.common.layers.weights import other_bytes, weights_bytes
from gateway.models.rank import Rank
from gateway.models.sharding import parse_shard
from gateway.models.spec import group_tensors
from gateway.models.tensor import Tensor
from tests.support.published import model_from_config, tensors

Shapes = dict[str, tuple[int, ...]]
# Headers as Hugging Face checkpoints name them, written by hand for one small size: hidden 32, 4
# heads of 16, 2 KV heads, MLP 48, vocabulary 100, 3 experts of 24, shared expert 40.
SMALL: dict[str, Any] = {
    "architectures": ["AnyForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QKVO: Shapes = {
    "q_proj.weight": (64, 32),
    "k_proj.weight": (32, 32),
    "v_proj.weight": (32, 32),
    "o_proj.weight": (32, 64),
}
QKV_BIAS: Shapes = {"q_proj.bias": (64,), "k_proj.bias": (32,), "v_proj.bias": (32,)}
QK_NORM: Shapes = {"q_norm.weight": (16,), "k_norm.weight": (16,)}
NORMS: Shapes = {"input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,)}


def prefixed_shapes(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def swiglu(
    width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    gate, up, down = (f"{name}.weight" for name in names)
    return {gate: (width, 32), up: (width, 32), down: (32, width)}


def checkpoint(*layers: Shapes, head: bool = True) -> dict[str, Tensor]:
    whole: Shapes = {"model.embed_tokens.weight": (100, 32), "model.norm.weight": (32,)} | (
        {"lm_head.weight": (100, 32)} if head else {}
    )
    for number, layer in enumerate(layers):
        whole |= prefixed_shapes(f"model.layers.{number}", NORMS | layer)
    return tensors(whole)


def layer_tensors(attention: Shapes, mlp: Shapes) -> dict[str, Tensor]:
    layer = prefixed_shapes("self_attn", attention) | mlp
    return checkpoint(layer, layer)


DENSE: Shapes = prefixed_shapes("mlp", swiglu(48))
EXPERTS: Shapes = {"mlp.gate.weight": (3, 32)}
for number in range(3):
    EXPERTS |= prefixed_shapes(f"mlp.experts.{number}", swiglu(24))
SHARED: Shapes = prefixed_shapes("mlp.shared_expert", swiglu(40)) | {
    "mlp.shared_expert_gate.weight": (1, 32)
}
MIXTRAL: Shapes = {"block_sparse_moe.gate.weight": (3, 32)}
for number in range(3):
    MIXTRAL |= prefixed_shapes(f"block_sparse_moe.experts.{number}", swiglu(48, ("w1", "w3", "w2")))
OUT_BIAS: Shapes = {"o_proj.bias": (32,)}
MLP_BIAS: Shapes = {
    "mlp.gate_proj.bias": (48,),
    "mlp.up_proj.bias": (48,),
    "mlp.down_proj.bias": (32,),
}

FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "llama": ({"model_type": "llama"}, layer_tensors(QKVO, DENSE)),
    "llama, tied": (
        {"model_type": "llama", "tie_word_embeddings": True},
        checkpoint(*[prefixed_shapes("self_attn", QKVO) | DENSE] * 2, head=False),
    ),
    "llama, biased": (
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        layer_tensors(QKVO | QKV_BIAS | OUT_BIAS, DENSE | MLP_BIAS),
    ),
    "granite": ({"model_type": "granite"}, layer_tensors(QKVO, DENSE)),
    "mistral": ({"model_type": "mistral"}, layer_tensors(QKVO, DENSE)),
    "qwen2": ({"model_type": "qwen2"}, layer_tensors(QKVO | QKV_BIAS, DENSE)),
    "qwen3": ({"model_type": "qwen3"}, layer_tensors(QKVO | QK_NORM, DENSE)),
    "mixtral": (
        {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
        layer_tensors(QKVO, MIXTRAL),
    ),
    "qwen2_moe": (
        {"model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 40},
        layer_tensors(QKVO | QKV_BIAS, EXPERTS | SHARED),
    ),
    "qwen3_moe": ({"model_type": "qwen3_moe", **MOE}, layer_tensors(QKVO | QK_NORM, EXPERTS)),
    "qwen3_moe, first layer dense": (
        {"model_type": "qwen3_moe", **MOE, "mlp_only_layers": [0]},
        checkpoint(
            prefixed_shapes("self_attn", QKVO | QK_NORM) | DENSE,
            prefixed_shapes("self_attn", QKVO | QK_NORM) | EXPERTS,
        ),
    ),
}


def read(
    fields: dict[str, Any], headers: dict[str, Tensor] | None = None, task: Any = None
) -> ModelSpec:
    return model_from_config(fields, tensors=headers, task=task)


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_and_config_say_the_same_bytes(family: str) -> None:
    fields, headers = FAMILIES[family]
    config_spec, header_spec = read(SMALL | fields), read(SMALL | fields, headers)
    assert header_spec.tensors == group_tensors(headers)
    assert build(header_spec).is_known
    for tp in (1, 2):
        byte_count = sum(other_bytes(tensor, tp, "bfloat16", 2) for tensor in header_spec.tensors)
        assert (
            weights_bytes(build(config_spec), Rank(tp=tp))
            == weights_bytes(build(header_spec), Rank(tp=tp))
            == byte_count
        )


def test_a_head_that_engines_do_not_load_is_left_out() -> None:
    fields, headers = FAMILIES["llama"]
    for spec in (
        read(SMALL | fields | {"tie_word_embeddings": True}, headers),
        read(
            {
                "architectures": ["A"],
                "model_type": "llava",
                "tie_word_embeddings": True,
                "text_config": SMALL | fields,
            },
            headers,
        ),
        read(SMALL | fields, headers, "embed"),
    ):
        assert "lm_head.weight" not in {tensor.name for tensor in spec.tensors}


def test_the_shard_follows_from_the_name() -> None:
    shards = {
        "model.layers.*.self_attn.q_proj.weight": "column",
        "model.layers.*.self_attn.qkv_proj.weight": "column",
        "model.layers.*.self_attn.k_proj.bias": "kv",
        "model.layers.*.self_attn.o_proj.weight": "row",
        "h.*.mlp.c_proj.weight": "row",
        "gpt_neox.layers.*.attention.dense.weight": "row",
        "encoder.layer.*.attention.self.query.weight": "column",
        "encoder.layer.*.output.dense.weight": "row",
        "pooler.dense.weight": "replicated",
        "model.layers.*.mlp.gate.weight": "replicated",
        "model.layers.*.mlp.shared_expert_gate.weight": "replicated",
        "model.layers.*.self_attn.q_norm.weight": "replicated",
        "model.layers.*.mlp.experts.*.up_proj.weight": "expert_column",
        "model.layers.*.mlp.experts.gate_up_proj": "expert_column",
        "model.layers.*.mlp.experts.down_proj": "expert_row",
        "model.layers.*.mlp.experts.down_proj_bias": "replicated",
        "model.layers.*.block_sparse_moe.experts.*.w2.weight": "expert_row",
        "model.layers.*.block_sparse_moe.input_linear.weight": "expert_column",
        "model.layers.*.self_attn.kv_b_proj.weight": "column",
        "model.layers.*.self_attn.kv_a_proj_with_mqa.weight": "replicated",
        "backbone.layers.*.mixer.in_proj.weight": "column",
        "backbone.layers.*.mixer.x_proj.weight": "row",
        "backbone.layers.*.mixer.A_log": "column",
        "model.layers.*.conv.in_proj.weight": "column",
        "vision_tower.vision_model.encoder.layers.*.self_attn.k_proj.weight": "column",
        "vision_tower.encoder.layer.*.attention.k_proj.weight": "replicated",
        "visual.blocks.*.attn.proj.weight": "row",
        "model.visual.merger.linear_fc1.weight": "column",
        "model.layers.*.linear_attn.in_proj_qkvz.weight": "column",
        "model.layers.*.linear_attn.norm.weight": "replicated",
        "model.decoder.embed_tokens.weight": "vocab",
        "backbone.embeddings.weight": "vocab",
        "transformer.wte.weight": "vocab",
        "lm_head.weight": "vocab",
    }
    assert {name: parse_shard(name) for name in shards} == shards
