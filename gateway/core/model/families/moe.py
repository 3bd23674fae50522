"""Decoders whose MLPs are experts, all or from some layer on: Mixtral, gpt-oss, Qwen2/3-MoE, GLM-4-MoE. Pure.

Sources: models/mixtral.py, gpt_oss.py, qwen2_moe.py, qwen3_moe.py, glm4_moe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gateway.core.model.blueprint import Blueprint, Built
from gateway.core.model.config import Fields
from gateway.core.model.families.parts import attention, ends, experts, layer_numbers, mlp, norms, router, tensor
from gateway.core.model.families.softmax import heads_of, softmax_groups
from gateway.domain import TensorGroup

_NORMS = ("input_layernorm", "post_attention_layernorm")


def mixtral(fields: Fields, family: str, path: str) -> Blueprint:
    numbers, hidden, layer = layer_numbers(fields), fields.integer("hidden_size"), f"{path}.layers.*"
    count, block = fields.integer("num_local_experts"), f"{layer}.block_sparse_moe"
    linears = [
        *attention(fields, family, f"{layer}.self_attn", numbers),
        router(f"{block}.gate", numbers, hidden, count),
        *experts(block, numbers, hidden, fields.integer("intermediate_size"), count),
    ]
    others = ends(fields, path) + norms(layer, len(numbers), hidden, *_NORMS)
    return Blueprint(tuple(linears), softmax_groups(fields, family), tuple(others))


def gpt_oss(fields: Fields, family: str, path: str) -> Blueprint:
    numbers, hidden, layer = layer_numbers(fields), fields.integer("hidden_size"), f"{path}.layers.*"
    count = fields.integer("num_local_experts")
    linears = [
        *attention(fields, family, f"{layer}.attn", numbers, bias=True, out_bias=True),
        router(f"{layer}.mlp.router", numbers, hidden, count, bias=True),
        *experts(f"{layer}.mlp", numbers, hidden, fields.integer("intermediate_size"), count, bias=True),
    ]
    others = ends(fields, path, embedding="embedding") + norms(layer, len(numbers), hidden, *_NORMS)
    others.append(tensor(f"{layer}.attn.sinks", len(numbers), heads_of(fields, family)[0], shard="column"))
    return Blueprint(tuple(linears), softmax_groups(fields, family, sinks=True), tuple(others))


def qwen_moe(fields: Fields, family: str, path: str) -> Blueprint:
    numbers, layer = layer_numbers(fields), f"{path}.layers.*"
    bias = family == "qwen2_moe" or fields.flag("attention_bias")
    linears = attention(fields, family, f"{layer}.self_attn", numbers, bias=bias) + qwen_mlps(fields, family, layer, numbers)
    others = ends(fields, path) + norms(layer, len(numbers), fields.integer("hidden_size"), *_NORMS)
    if family == "qwen3_moe":
        others += norms(f"{layer}.self_attn", len(numbers), heads_of(fields, family)[2], "q_norm", "k_norm")
    return Blueprint(tuple(linears), softmax_groups(fields, family), tuple(others))


def qwen_mlps(fields: Fields, family: str, layer: str, numbers: Sequence[int]) -> list[Built]:
    """The MLPs of Qwen2-MoE and later: experts every `decoder_sparse_step` layers, with one expert that all tokens take."""
    hidden, path = fields.integer("hidden_size"), f"{layer}.mlp"
    sparse = _sparse_layers(fields, numbers)
    rest = [number for number in numbers if number not in sparse]
    built = mlp(path, rest, hidden, fields.integer("intermediate_size")) if rest else []
    if not sparse:
        return built
    count = fields.integer("num_experts")
    # Only Qwen3-MoE hands its router the checkpoint's quantization (models/qwen3_moe.py:176 of 0.19.1, :170 of 0.33.0).
    quantizable = family == "qwen3_moe"
    built.append(Built(f"{path}.gate", sparse, hidden, (count,), "replicated", quantizable=quantizable))
    built += experts(path, sparse, hidden, fields.integer("moe_intermediate_size"), count)
    shared = bool(fields.config.get("shared_expert_intermediate_size"))
    if shared:
        built += mlp(f"{path}.shared_expert", sparse, hidden, fields.integer("shared_expert_intermediate_size"))
    if shared or family != "qwen3_moe":
        built.append(router(f"{path}.shared_expert_gate", sparse, hidden, 1))
    return built


def _sparse_layers(fields: Fields, numbers: Sequence[int]) -> list[int]:
    """The layers with experts. Source: Qwen3MoeDecoderLayer (models/qwen3_moe.py)."""
    step, dense = fields.integer("decoder_sparse_step", default=1), fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise fields.wrong("mlp_only_layers", "a list of layer numbers")
    without = set(dense)
    return [number for number in numbers if (number + 1) % step == 0 and number not in without]


def glm_moe(fields: Fields, family: str, path: str) -> Blueprint:
    numbers, hidden, layer = layer_numbers(fields), fields.integer("hidden_size"), f"{path}.layers.*"
    mlps, others = late_moe(fields, layer, numbers, float_router=True)
    linears = attention(fields, family, f"{layer}.self_attn", numbers, bias=fields.flag("attention_bias")) + mlps
    others += ends(fields, path) + norms(layer, len(numbers), hidden, *_NORMS)
    if fields.flag("use_qk_norm"):
        others += norms(f"{layer}.self_attn", len(numbers), heads_of(fields, family)[2], "q_norm", "k_norm")
    return Blueprint(tuple(linears), softmax_groups(fields, family), tuple(others))


def late_moe(
    fields: Fields, layer: str, numbers: Sequence[int], *, float_router: bool = False
) -> tuple[list[Built], list[TensorGroup]]:
    """Dense MLPs first, then experts, with some that all tokens take (DeepSeek, GLM-4-MoE).

    A router that computes in float32 (Glm4MoE in models/glm4_moe.py) is not one of the linear layers.
    """
    hidden, path = fields.integer("hidden_size"), f"{layer}.mlp"
    first, step = fields.integer("first_k_dense_replace", least=0), fields.integer("moe_layer_freq", default=1)
    sparse = [number for number in numbers if number >= first and number % step == 0]
    rest = sorted(set(numbers) - set(sparse))
    built = mlp(path, rest, hidden, fields.integer("intermediate_size")) if rest else []
    others: list[TensorGroup] = []
    if not sparse:
        return built, others
    count, width = fields.integer("n_routed_experts"), fields.integer("moe_intermediate_size")
    if float_router:
        others.append(tensor(f"{path}.gate.weight", len(sparse), count, hidden, dtype="F32"))
    else:
        built.append(router(f"{path}.gate", sparse, hidden, count))
    if float_router or fields.config.get("topk_method") == "noaux_tc":
        others.append(tensor(f"{path}.gate.e_score_correction_bias", len(sparse), count, dtype="F32"))
    built += experts(path, sparse, hidden, width, count)
    if "n_shared_experts" not in fields.config:
        raise fields.missing("n_shared_experts")
    if fields.config["n_shared_experts"]:
        built += mlp(f"{path}.shared_experts", sparse, hidden, width * fields.integer("n_shared_experts"))
    return built, others


FAMILIES: Mapping[str, Callable[[Fields, str, str], Blueprint]] = {
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), qwen_moe),
    "glm4_moe": glm_moe,
}
