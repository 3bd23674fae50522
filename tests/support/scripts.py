"""A program of scripts/ as a module."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

from tests.support.paths import ROOT


def script_module(name: str) -> ModuleType:
    """The program of that name, which imports its neighbours as it does when it is started."""
    folder = str(ROOT / "scripts")
    sys.path.insert(0, folder)
    try:
        file = name if (ROOT / "scripts" / name).is_file() else f"{name}.py"
        loader = SourceFileLoader(name.replace("-", "_"), f"{folder}/{file}")
        spec = spec_from_loader(loader.name, loader)
        assert spec is not None
        module = module_from_spec(spec)
        sys.modules[loader.name] = module
        loader.exec_module(module)
        return module
    finally:
        sys.path.remove(folder)
