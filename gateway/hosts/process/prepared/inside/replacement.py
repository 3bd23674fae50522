"""Functions of an engine that others replace, immediately or when their module is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

Wrapper = Callable[[Callable[..., Any], Any], Callable[..., Any]]
"""A function that takes a function and its module, and returns the replacement."""


def replace_function(name: str, wrap: Wrapper) -> None:
    """Replace `MODULE:NAME` or `MODULE:CLASS.NAME`; a name that the engine lacks is left out.

    A module that is not imported yet is changed at its import, since an import may begin CUDA.
    """
    module_name, _, path = name.partition(":")
    if module_name in sys.modules:
        replace_in(sys.modules[module_name], path, wrap)
    else:
        sys.meta_path.insert(0, ImportHook(module_name, path, wrap))


def replace_in(module: Any, path: str, wrap: Wrapper) -> None:
    """Replace the function in its module, and in modules of its package that have imported it."""
    class_name, _, attribute = path.rpartition(".")
    owner = getattr(module, class_name, None) if class_name else module
    original = getattr(owner, attribute, None)
    if not callable(original):
        return
    replacement = wrap(original, module)
    setattr(owner, attribute, replacement)
    package = module.__name__.partition(".")[0]
    for name, holder in list(sys.modules.items()):
        if (
            name.partition(".")[0] == package
            and getattr(holder, "__dict__", {}).get(attribute) is original
        ):
            setattr(holder, attribute, replacement)


class ImportHook:
    """A finder that replaces a function as soon as its module is imported."""

    def __init__(self, module_name: str, path: str, wrap: Wrapper) -> None:
        self._module_name = module_name
        self._path = path
        self._wrap = wrap

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._module_name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = getattr(spec, "loader", None)
        if loader is not None:
            execute = loader.exec_module

            def execute_and_replace(module: Any) -> None:
                execute(module)
                replace_in(module, self._path, self._wrap)

            loader.exec_module = execute_and_replace
        return spec
