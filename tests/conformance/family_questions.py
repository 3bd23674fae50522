"""Every parameter that vLLM itself builds of a published model, on one rank of 1, 2, 4 and 8, and
the attention of its layers.

A question is a model; an answer is {"parameters": [[name, count, dtype, shapes]], "attention":
[[name, count, heads, KV heads, head size, window, whether it reads another layer's cache]],
"refused": [ranks]}. `shapes` are those at each of TENSOR_PARALLEL that the engine does not refuse,
one where they are all alike. Layers of attention are told as one rank of one has them.

Versions before 0.33.0 read the config.json of newer models with an older transformers
(OLDER_BEFORE).
"""

from __future__ import annotations

import collections
import importlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gateway.engines.vllm.inside.model import build_from_config
from tests.conformance.layer_cases import TENSOR_PARALLEL
from tests.support.paths import MODELS
from tests.support.versions import since

CAPABILITIES = ("9.0 all",)
OLDER_BEFORE = "0.33"  # versions before are asked with requirements/asking-older.txt

_EVERYWHERE = (
    "bge-large-en-v1.5",
    "bge-m3",
    "command-r7b",
    "deepseek-v3.2",
    "ernie-4.5-21b-a3b",
    "gemma-3-27b",
    "gemma-3-4b",
    "glm-4-32b",
    "granite-4.0-h-micro",
    "granite-4.0-h-small",
    "gte-modernbert-base",
    "minimax-m2",
    "mistral-small-3.2-24b",
    "nemotron-3-nano-30b-a3b",
    "olmo-2-13b",
    "olmo-3-7b",
    "phi-3.5-moe",
    "phi-4-mini",
    "qwen2.5-vl-7b",
    "qwen3-embedding-0.6b",
    "qwen3-vl-8b",
    "seed-oss-36b",
)
_SINCE = {
    # 0.18.0 ties Qwen3-VL-MoE's head, but only with a transformers later than those it was made
    # for.
    "0.19.1": ("gemma-4-26b-a4b", "gemma-4-31b", "gemma-4-e4b", "qwen3-vl-30b-a3b"),
    "0.26.0": ("nomic-embed-text-v1.5",),  # before, it cannot be built from config.json alone
    "0.33.0": ("nemotron-nano-9b-v2",),  # before, by no transformers that builds the others too
}
_POOLING = {
    "bge-large-en-v1.5",
    "bge-m3",
    "gte-modernbert-base",
    "nomic-embed-text-v1.5",
    "qwen3-embedding-0.6b",
}
_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


def questions(version: str) -> list[str]:
    later = (models for first_version, models in _SINCE.items() if since(version, first_version))
    return [*_EVERYWHERE, *(model for models in later for model in models)]


def config(model: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((MODELS / f"{model}.json").read_text())
    return fields


@contextmanager
def make_questions(model: str, tp: int) -> Iterator[Any]:
    arguments: dict[str, Any] = {"runner": "pooling"} if model in _POOLING else {}
    with build_from_config(config(model), tp, max_model_len=512, **arguments) as (_, engine_model):
        yield engine_model


def _shapes(model: Any) -> dict[str, tuple[list[int], str]]:
    return {
        path: (list(parameter.shape), _DTYPES[str(parameter.dtype)])
        for path, parameter in model.named_parameters()
    }


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path).replace(".routed_experts.", ".")


def _attention(model: Any) -> list[list[Any]]:
    counts: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for path, module in model.named_modules():
        if (
            hasattr(module, "head_size")
            and hasattr(module, "num_kv_heads")
            and "Attention" in type(module).__name__
        ):
            shares = getattr(module, "kv_sharing_target_layer_name", None) is not None
            sizes = (
                module.num_heads,
                module.num_kv_heads,
                module.head_size,
                getattr(module, "sliding_window", None),
                shares,
            )
            counts[_pattern(path), *sizes] += 1
    return [[name, count, *rest] for (name, *rest), count in sorted(counts.items(), key=str)]


def _answer(model: str) -> dict[str, Any]:
    ranks: dict[int, dict[str, tuple[list[int], str]]] = {}
    tensor_parallel_sizes: list[int] = []
    attention: list[list[Any]] = []
    for tp in TENSOR_PARALLEL:
        try:
            with make_questions(model, tp) as model_questions:
                ranks[tp] = _shapes(model_questions)
                attention = attention or _attention(model_questions)
        except Exception as error:  # an engine's refusal is an answer
            if tp == 1:
                raise RuntimeError(f"{model} cannot be built") from error
            tensor_parallel_sizes.append(tp)
    rows: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for path, (_, dtype) in ranks[1].items():
        shapes = [shapes[path][0] for shapes in ranks.values()]
        rows[
            _pattern(path),
            dtype,
            json.dumps(shapes[:1] if all(shape == shapes[0] for shape in shapes) else shapes),
        ] += 1
    parameters = [
        [name, count, dtype, json.loads(shapes)]
        for (name, dtype, shapes), count in sorted(rows.items())
    ]
    return {"parameters": parameters, "attention": attention, "refused": tensor_parallel_sizes}


def answers(version: str) -> list[dict[str, Any]]:
    # Later versions ask for the module where they use it.
    with suppress(ModuleNotFoundError, AttributeError):
        workspace: Any = importlib.import_module("vllm.v1.worker.workspace")
        workspace.init_workspace_manager(importlib.import_module("torch").device("meta"))
    return [_answer(model) for model in questions(version)]
