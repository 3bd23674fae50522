"""Which parameters does one rank hold beside its linear layers, and how many bytes of all?
Questions, and how they are asked.

A question is a published model, unquantized, with changed fields (null: without it), and its
purpose; an answer is {"others": [[name, count, shape, dtype]] of the uncut model, "bytes": [at each
of TENSOR_PARALLEL, null where the engine refuses that many ranks]}. Buffers (rotary tables, scales
of the KV cache) are not parameters.
"""

from __future__ import annotations

import collections
import importlib
import re
from typing import Any

from gateway.engines.vllm.inside.model import build_from_config
from tests.conformance.layer_cases import PUBLISHED, TENSOR_PARALLEL, case

CAPABILITIES = ("9.0",)

# Behaviour of families with fields that the published configs do not have so.
VARIANTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("llama-3.1-8b", {"attention_bias": True, "mlp_bias": True}, "generate"),
    ("llama-3.1-8b", {"bias": True, "qkv_bias": False, "head_dim": 64}, "generate"),
    (
        "llama-3.1-8b",
        {
            "model_type": "gemma",
            "architectures": ["GemmaForCausalLM"],
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        },
        "generate",
    ),
    ("llama-3.2-1b", {"tie_word_embeddings": None, "num_key_value_heads": None}, "generate"),
    ("mistral-7b-v0.3", {"attention_bias": True}, "generate"),
    (
        "granite-3.1-2b",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        "generate",
    ),
    ("phi-4", {"attention_bias": True, "tie_word_embeddings": True}, "generate"),
    ("qwen2.5-7b", {"attention_bias": False}, "generate"),
    ("qwen3-8b", {"attention_bias": True, "head_dim": None}, "generate"),
    ("qwen3-8b", {}, "embed"),
    ("gemma-2-9b", {"attention_bias": True}, "generate"),
    ("gemma-3-1b", {"tie_word_embeddings": False}, "generate"),
    ("gemma-3-1b", {"attention_bias": True, "head_dim": None}, "generate"),
    ("gemma-3-1b", {"use_bidirectional_attention": True}, "embed"),
    ("mixtral-8x7b", {"tie_word_embeddings": True, "head_dim": 64}, "generate"),
    ("gpt-oss-20b", {"attention_bias": False, "num_local_experts": 12}, "generate"),
    ("qwen1.5-moe-a2.7b", {"mlp_only_layers": [0, 3], "decoder_sparse_step": 2}, "generate"),
    (
        "qwen3-30b-a3b",
        {"mlp_only_layers": [1], "attention_bias": True, "shared_expert_intermediate_size": 512},
        "generate",
    ),
    (
        "glm-4.5-air",
        {"use_qk_norm": True, "n_shared_experts": 0, "attention_bias": False},
        "generate",
    ),
    ("glm-4.5-air", {"first_k_dense_replace": 3, "n_shared_experts": 2}, "generate"),
    (
        "deepseek-v2-lite",
        {"moe_layer_freq": 2, "n_shared_experts": 1, "attention_bias": True},
        "generate",
    ),
    (
        "deepseek-v3",
        {"topk_method": "greedy", "q_lora_rank": 768, "first_k_dense_replace": 0},
        "generate",
    ),
    (
        "qwen3-next-80b-a3b",
        {"attn_output_gate": False, "qkv_bias": True, "full_attention_interval": 3},
        "generate",
    ),
    (
        "qwen3-next-80b-a3b",
        {
            "mlp_only_layers": [0],
            "shared_expert_intermediate_size": 0,
            "mamba_ssm_dtype": "float32",
        },
        "generate",
    ),
    ("qwen3.6-35b-a3b", {"tie_word_embeddings": True}, "generate"),
)

_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


def questions(_: str) -> list[tuple[str, dict[str, Any], str]]:
    return [*((model, {}, "generate") for model in PUBLISHED), *VARIANTS]


def question_config(model: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The config.json of this question."""
    return {
        key: value
        for key, value in (case(model, "none") | changes).items()
        if value is not None or key not in changes
    }


def _other_parameters(model: Any) -> list[list[Any]]:
    base: Any = importlib.import_module("vllm.model_executor.layers.linear").LinearBase
    linear = {
        path
        for path, module in model.named_modules()
        if isinstance(module, base)
        or "moe" in type(getattr(module, "quant_method", None)).__name__.lower()
    }
    counts: collections.Counter[tuple[str, tuple[int, ...], str]] = collections.Counter()
    for path, parameter in model.named_parameters():
        owner, _, last = path.rpartition(".")
        if owner not in linear or last == "e_score_correction_bias":
            name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
            counts[name, tuple(parameter.shape), _DTYPES[str(parameter.dtype)]] += 1
    return [
        [name, count, list(shape), dtype] for (name, shape, dtype), count in sorted(counts.items())
    ]


def answers(version: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for model, changes, task in questions(version):
        runner = "pooling" if task == "embed" else "generate"
        answer: dict[str, Any] = {"bytes": []}
        for tp in TENSOR_PARALLEL:
            try:
                with build_from_config(question_config(model, changes), tp, runner=runner) as (
                    _,
                    engine_model,
                ):
                    answer["bytes"].append(
                        sum(
                            parameter.numel() * parameter.element_size()
                            for parameter in engine_model.parameters()
                        )
                    )
                    answer.setdefault("others", _other_parameters(engine_model))
            except Exception:  # an engine's refusal is an answer
                answer["bytes"].append(None)
        rows.append(answer)
    return rows
