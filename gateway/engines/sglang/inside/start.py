"""A start of SGLang, as far as it runs without weights and without memory for its pools.

The command line of a plan goes through the parser, the resolution and the checks of ServerArgs, the
model on the meta device with its kernels, the choice of attention backends, and the pools of the
planned bytes.
Refusals are the engine's own (`inside/stages.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...inside.meta import write_folder
from ...inside.stages import Start
from .answers import kernels
from .attention import record_backends, select_backends
from .cache import pool_tokens
from .model import build_model, configure_engine, meta, parse_arguments, resolve_argument

# These stages of this engine are never run.
_SKIPPED_STAGES = ("constructors of attention backends", "capture of CUDA graphs")


def rehearse(
    files: Mapping[str, bytes],
    argv: Sequence[str],
    kv_bytes: int,
    error_text: Callable[[BaseException], str],
) -> dict[str, Any]:
    """The start of this command line with pools of `kv_bytes` on each rank; 0: no pool.

    Of pipeline stages the first is built. The answer has the values `tokens` and `graph_sizes`.
    """
    record_backends()
    start = Start("sglang", error_text)
    start.left_out += _SKIPPED_STAGES
    with write_folder(files) as folder:
        server_args = start.run("parser", lambda: parse_arguments(folder, argv))
        if server_args is None:
            return start.answer
        # A resolution that failed cannot be repeated.
        if not start.run("configuration", lambda: _resolve(server_args)):
            return start.answer
        start.run("checks", server_args.check_server_args)
        configuration = start.run("configuration", lambda: configure_engine(server_args))
        if configuration is not None:
            start.run("", lambda: _build_engine(start, configuration, kv_bytes))
    return start.answer


def _resolve(server_args: Any) -> bool:
    """Resolve ServerArgs as the launched server does, before it checks and publishes them. Older
    versions resolve themselves."""
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return True


def _build_engine(start: Start, configuration: Any, kv_bytes: int) -> None:
    torch: Any = importlib.import_module("torch")
    dtype = str(configuration.model.dtype).removeprefix("torch.")
    memory = int(torch.cuda.get_device_properties(0).total_memory)
    start.run(
        "backends", lambda: select_backends(configuration.arguments, configuration.model) and True
    )
    with meta(dtype):
        built_model = start.run("model", lambda: build_model(configuration))
        if built_model is not None:
            start.run("kernels", lambda: kernels(built_model, dtype) and True)
    if built_model is not None and kv_bytes:
        tokens = start.run(
            "cache", lambda: pool_tokens(configuration, built_model, memory, kv_bytes)
        )
        start.results |= {"tokens": tokens} if tokens is not None else {}
    sizes = start.run(
        "graphs", lambda: resolve_argument(configuration.arguments, "cuda_graph_bs_decode")
    )
    if isinstance(sizes, list):
        start.results["graph_sizes"] = [int(size) for size in sizes]
