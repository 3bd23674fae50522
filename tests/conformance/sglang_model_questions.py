"""Whole models, as SGLang itself builds them: kernel of every layer, backend of every attention
layer, bytes on one rank, pools.

A question is (model, quantization, capability); only those of the capability that is booted are
answered, the rest are null. They go through the code that gateways run inside engines' images, with
the command line of a plan. An answer has, for each of RANKS,

    layers     "NAME KERNEL KxN COUNT", of experts with " EXPERTS" behind
    attention  "KIND HEAD_SIZE BACKEND COUNT"
    weights    bytes of all parameters of one rank
    kv         [bytes of a page, bytes that no token gets, tokens of the longest request, its bytes]
    fraction   share of the GPU for weights and pools

or the engine's refusal, cut.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from gateway.engines.inside.__main__ import error_text
from gateway.engines.sglang.inside import answers as sglang_answers
from tests.conformance import sglang_attention_questions, sglang_moe_questions
from tests.conformance.model_cases import ONLINE, config, pooling, triples
from tests.support.versions import NEWEST_VLLM, since

ENGINE = "sglang"
OLDER_BEFORE = "0.5.11"
CAPABILITIES = ("8.6", "9.0", "12.0")
RANKS = (1, 2)
GPU_BYTES = 24 << 30  # of those that are stated


def questions(version: str) -> list[tuple[str, str, str]]:
    lacks = {*sglang_attention_questions.NONE_HAS}
    for additions in (sglang_attention_questions.ADDED, sglang_moe_questions.READ_SINCE):
        lacks |= {
            name
            for first_version, names in additions.items()
            if not since(version, first_version)
            for name in names
        }
    return [
        triple
        for triple in triples(NEWEST_VLLM)
        if triple[0] not in lacks and triple[2] in CAPABILITIES
    ]


def config_of(model: str, quant: str) -> dict[str, Any]:
    """As published, but for the number of layers."""
    return complete(config(model, quant))


def complete(fields: dict[str, Any]) -> dict[str, Any]:
    """With two fields that SGLang reads: they do not decide shapes, and the kept config leaves them
    out."""
    text = fields.get("text_config", fields)
    if "linear_attention" in text.get("layer_types", ()):
        text.setdefault("full_attention_interval", text["layer_types"].index("full_attention") + 1)
    if "hidden_activation" in text:
        text.setdefault("hidden_act", text["hidden_activation"])
    return fields


def argv(model: str, quant: str, tp: int) -> list[str]:
    # The planner chooses this dtype too.
    dtype = str(config_of(model, quant).get("torch_dtype") or "bfloat16").replace(
        "float32", "bfloat16"
    )
    more = ["--is-embedding"] if pooling(model) else []
    return [
        f"--tp-size={tp}",
        f"--dtype={dtype}",
        *more,
        *(["--quantization=fp8"] if quant == ONLINE else []),
    ]


def answers(version: str) -> list[Any]:
    torch: Any = importlib.import_module("torch")
    own_capability = ".".join(str(number) for number in torch.cuda.get_device_capability())
    return [
        _answer(model, quant) if text == own_capability else None
        for model, quant, text in questions(version)
    ]


def _answer(model: str, quant: str) -> list[Any]:
    return [_of_rank(model, quant, tp) for tp in RANKS]


def _of_rank(model: str, quant: str, tp: int) -> Any:
    files = {"config.json": json.dumps(config_of(model, quant)).encode()}
    try:
        answer = sglang_answers.answer_question(files, argv(model, quant, tp))
    except Exception as error:  # an engine's refusal is an answer
        return error_text(error)[:160]
    kv = answer["kv"]
    return {
        "layers": [_layer(row) for row in answer["kernels"]],
        "attention": [
            " ".join(str(row[name]) for name in ("kind", "head_dim", "backend", "layers"))
            for row in answer["attention"]
        ],
        "weights": answer["weights"],
        "kv": [kv["block_bytes"], kv["fixed"], *kv["needed"][-1]],
        "fraction": round(answer["settled"]["static_fraction"], 6),
    }


def _layer(row: dict[str, Any]) -> str:
    experts = f" {row['experts']}" if row["experts"] else ""
    return f"{row['layer']} {row['kernel']} {row['k']}x{row['n']} {row['count']}{experts}"
