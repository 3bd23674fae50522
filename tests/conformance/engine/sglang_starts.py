"""Answers of SGLang's parser and its resolution to whole command lines: read from standard input,
as the launched server reads them.

    {"memory_mib": 24576, "starts": [[{config.json}, ["--tp-size=1", ...]], ...]}

An answer has the engine's words where it refuses, or properties of the start: `tp`, `graphs`
(whether it captures any).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gateway.engines.inside.__main__ import error_text
from gateway.engines.sglang.inside import boot as sglang_boot
from gateway.engines.sglang.inside import model as sglang_model


def answers(version: str) -> list[dict[str, Any]]:
    del version
    document = json.load(sys.stdin)
    sglang_boot.state_memory(document["memory_mib"])
    with TemporaryDirectory() as folder:
        return [
            _answer(Path(folder) / str(number), *start)
            for number, start in enumerate(document["starts"])
        ]


def _answer(folder: Path, config: dict[str, Any], argv: list[str]) -> dict[str, Any]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    try:
        arguments = sglang_model.parse_arguments(str(folder), argv)
        sglang_model.publish(arguments)
    except Exception as error:  # an engine's refusal is an answer
        return {"refused": error_text(error)}
    return {"tp": sglang_model.resolve_argument(arguments, "tp_size"), "graphs": _graphs(arguments)}


def _graphs(arguments: Any) -> bool:
    if not hasattr(arguments, "cuda_graph_config"):  # 0.5.10
        return not arguments.disable_cuda_graph
    phases: Any = sglang_model.resolve_argument(arguments, "cuda_graph_config")
    return any(_backend(phases[phase]) != "disabled" for phase in ("decode", "prefill"))


def _backend(phase: Any) -> str:
    """As a mapping, a phase has only fields without their default."""
    backend: str = phase.get("backend", "") if isinstance(phase, dict) else phase.backend
    return backend
