"""Kernels of FlashInfer that a compiler builds in a thread, from the choice of the engine on.

An engine chooses its sampler and its kernels before it reads weights, and calls them a minute
later. The first call builds the module: 117 s for sampling and 105 s for block FP8 on an H200. A
build holds a lock of FlashInfer, so the call waits for the rest of the build.
"""

from __future__ import annotations

import importlib
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from .replacement import replace_function


def build_at_choice(builders: Mapping[str, str]) -> None:
    """Let each function begin a build, unless it answers False.

    builders: function that the engine calls at its choice -> function `MODULE:NAME` of the build,
    whose answer has is_aot and build().
    """
    begun_names: set[str] = set()
    for choice, builder in builders.items():
        replace_function(choice, _wrapper(builder, begun_names))


def _wrapper(builder: str, begun_names: set[str]) -> Callable[..., Callable[..., Any]]:
    def wrap(choose: Callable[..., Any], module: Any) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            answer = choose(*arguments, **options)
            if answer is not False and builder not in begun_names:
                begun_names.add(builder)
                threading.Thread(target=build, args=[builder], daemon=True).start()
            return answer

        return run

    return wrap


def build(builder: str) -> None:
    """Build the missing modules. The engine meets an error again at its own call."""
    module_name, _, name = builder.partition(":")
    try:
        kernels = getattr(importlib.import_module(module_name), name)()
        if not kernels.is_aot:
            kernels.build(verbose=False)
    except Exception:
        traceback.print_exc()
