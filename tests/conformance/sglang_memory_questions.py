"""Settings that SGLang makes by itself: models x memory of a GPU x tensor parallel size x requests
x graphs, as its own ServerArgs resolves them.

An answer is (chunked prefill size, largest CUDA graph batch, share of memory), or the engine's
error.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway.engines.inside.meta import StandIn
from gateway.engines.sglang.inside import boot as sglang_boot
from gateway.engines.sglang.inside import model as sglang_model
from tests.support.paths import MODELS

ENGINE = "sglang"
CAPABILITIES = ("8.6", "9.0")
NAMES = (
    "llama-3.1-8b",
    "qwen3-8b",
    "mistral-7b-v0.3",
    "gemma-2-9b",
    "gemma-3-27b",
    "gpt-oss-20b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "qwen3-next-80b-a3b",
    "qwen2.5-vl-7b",
    "qwen3-vl-8b",
    "qwen3-embedding-0.6b",
)
# MiB, as nvidia-smi says them: 4080, A10G, 3090, 5090, A100 40G, L40S, H100, A100 80G, RTX PRO
# 6000, H200, B200, and more.
MEMORIES = (16376, 23028, 24576, 32607, 40960, 46068, 81559, 81920, 97887, 143771, 183359, 294912)
SIZES = (1, 2, 4, 8)
# Largest batches of decoding that a plan asks graphs for, beyond SGLang's own choice.
GRAPHS = (64, 200)

Question = tuple[str, int, int, int | None, bool, int | None]


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return config


def questions(version: str) -> Iterator[Question]:
    """(model, MiB, tp, requests, no graphs, largest batch with a graph)."""
    del version
    for name in NAMES:
        for memory in MEMORIES:
            for tp in SIZES:
                yield name, memory, tp, None, False, None
            yield name, memory, 1, 16, False, None
            yield name, memory, 2, 256, True, None
            for graphs in GRAPHS:
                yield name, memory, 1, 256, False, graphs


def answers(version: str) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return [_answer(Path(folder), question) for question in questions(version)]


def _answer(folder: Path, question: Question) -> Any:
    name, memory, tp, seqs, eager, graphs = question
    model = folder / name
    if not model.is_dir():
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config_of(name)))
    arguments: Any = importlib.import_module("sglang.srt.server_args")
    options: dict[str, Any] = {"max_running_requests": seqs} if seqs else {}
    options |= {"disable_cuda_graph": True} if eager else {}
    if graphs is not None:
        fields = getattr(arguments.ServerArgs, "__dataclass_fields__", {})
        flag = "cuda_graph_max_bs"
        options[flag if flag in fields else f"{flag}_decode"] = graphs
    arguments_of_engine, answer = resolve_memory(model, memory, tp, **options)
    return answer if arguments_of_engine else str(answer).replace(str(folder), "")


def resolve_memory(model: Path, memory: int, tp: int, **options: Any) -> tuple[Any, Any]:
    """(arguments as the engine resolves them, prefill tokens, graphs and share of memory), or
    (None, the engine's error)."""
    arguments: Any = importlib.import_module("sglang.srt.server_args")
    sglang_boot.state_memory(memory)
    try:
        server_args = arguments.ServerArgs(
            model_path=str(model),
            tp_size=tp,
            device="cuda",
            skip_tokenizer_init=True,
            load_format="dummy",
            **options,
        )
        if hasattr(server_args, "resolve_once"):
            server_args.resolve_once()
            batch = sglang_model.resolve_argument(server_args, "cuda_graph_config")["decode"][
                "max_bs"
            ]
        else:
            batch = server_args.cuda_graph_max_bs
        chunk, share = (
            sglang_model.resolve_argument(server_args, name)
            for name in ("chunked_prefill_size", "mem_fraction_static")
        )
        return server_args, [chunk, batch, round(share, 6)]
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"[:200]


def request_states(arguments: Any) -> int:
    """States of recurrent layers for each running request, if the model has such layers."""
    sglang_model.publish(arguments)
    for name, kind in (
        ("mem_cache.kv_cache_configurator", "KVCacheConfigurator"),
        ("model_executor.model_runner_kv_cache_mixin", "ModelRunnerKVCacheMixin"),
    ):
        with suppress(ModuleNotFoundError):
            module = importlib.import_module(f"sglang.srt.{name}")
            return int(getattr(module, kind)._calculate_mamba_ratio(StandIn(server_args=arguments)))
    raise LookupError("no class of this version counts states")
