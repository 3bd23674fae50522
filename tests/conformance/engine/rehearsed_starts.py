"""Rehearsals of whole starts in one process, read from standard input, and the functions of the
engine that they enter.

    [{"files": {"config.json": {...}}, "argv": [...], "env": {...}, "kv_bytes": 1073741824,
      "traced": true}, ...]

An answer has `starts`, in this order, `entered`: [file, first line] of each function that a traced
start entered beside the imports of modules, and `devices`: the engine's properties of the stated
GPU.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from gateway.engines.inside.__main__ import error_text


def answers(version: str) -> dict[str, Any]:
    del version
    document = json.load(sys.stdin)
    kind = "sglang" if "sglang" in sys.modules else "vllm"
    package = importlib.import_module(kind)
    root = str(Path(str(package.__file__)).parent) + "/"
    start: Any = importlib.import_module(f"gateway.engines.{kind}.inside.start")
    code_objects: set[CodeType] = set()

    def trace(frame: FrameType, _event: str, _: Any) -> None:
        if frame.f_code not in code_objects and not _is_imported(frame, root):
            code_objects.add(frame.f_code)

    starts = []
    for question in document:
        files = {name: json.dumps(text).encode() for name, text in question["files"].items()}
        environment = dict(os.environ)
        os.environ.update(question["env"])
        sys.settrace(trace if question["traced"] else None)
        try:
            starts.append(start.rehearse(files, question["argv"], question["kv_bytes"], error_text))
        finally:
            sys.settrace(None)
            for name in question["env"]:
                os.environ.pop(name)
            os.environ.update(environment)
    return {
        "starts": starts,
        "devices": devices(kind),
        "entered": sorted(
            (code.co_filename[len(root) :], code.co_firstlineno)
            for code in code_objects
            if code.co_filename.startswith(root)
        ),
    }


def devices(kind: str) -> dict[str, bool]:
    """The engine's predicates of its GPU: attributes, or methods with "()"."""
    if kind == "sglang":
        runtime: Any = importlib.import_module("sglang.srt.runtime_context")
        platform, names = runtime.get_platform(), [*runtime._PLATFORM_PROBES]
        return {name: flag for name in names if isinstance(flag := getattr(platform, name), bool)}
    platform = importlib.import_module("vllm.platforms").current_platform
    result = {}
    for name in dir(type(platform)):
        if name.startswith("is_") and not inspect.signature(getattr(platform, name)).parameters:
            with suppress(Exception):  # a predicate of an unstated property
                result[f"{name}()"] = getattr(platform, name)()
    return {name: flag for name, flag in result.items() if isinstance(flag, bool)}


def _is_imported(frame: FrameType, root: str) -> bool:
    """Whether a module of the engine calls this function as it is imported."""
    caller = frame.f_back
    while caller is not None:
        code = caller.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(root):
            return True
        caller = caller.f_back
    return False
