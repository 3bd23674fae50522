"""Rehearsals of whole starts in one process, read from standard input, and the functions of the
engine that they enter.

    [{"files": {"config.json": {...}}, "argv": [...], "env": {...}, "kv_bytes": 1073741824,
      "traced": true}, ...]

An answer has `starts`, in this order, and `entered`: [file, first line] of each function that a
traced start entered beside the imports of modules.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from gateway.engines.inside.__main__ import words


def answers(version: str) -> dict[str, Any]:
    del version
    asked = json.load(sys.stdin)
    kind = "sglang" if "sglang" in sys.modules else "vllm"
    package = importlib.import_module(kind)
    root = str(Path(str(package.__file__)).parent) + "/"
    start: Any = importlib.import_module(f"gateway.engines.{kind}.inside.start")
    entered: set[CodeType] = set()

    def trace(frame: FrameType, _event: str, _: Any) -> None:
        if frame.f_code not in entered and not _is_imported(frame, root):
            entered.add(frame.f_code)

    starts = []
    for one in asked:
        files = {name: json.dumps(text).encode() for name, text in one["files"].items()}
        own = dict(os.environ)
        os.environ.update(one["env"])
        sys.settrace(trace if one["traced"] else None)
        try:
            starts.append(start.rehearsed(files, one["argv"], one["kv_bytes"], words))
        finally:
            sys.settrace(None)
            for name in one["env"]:
                os.environ.pop(name)
            os.environ.update(own)
    return {
        "starts": starts,
        "entered": sorted(
            (code.co_filename[len(root) :], code.co_firstlineno)
            for code in entered
            if code.co_filename.startswith(root)
        ),
    }


def _is_imported(frame: FrameType, root: str) -> bool:
    """Whether a module of the engine calls this function as it is imported."""
    caller = frame.f_back
    while caller is not None:
        code = caller.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(root):
            return True
        caller = caller.f_back
    return False
