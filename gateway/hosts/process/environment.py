"""Engines that are installed on this machine: each version in a virtual environment of its own, DATA_DIR/engines/KIND-VERSION/."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.core.variables import INHERITED
from gateway.domain import Engine, EngineRef

COMPLETE = ".complete"
"""A file that is written last, so that an installation which was cut off is not taken for a whole environment."""


def engine_dir(data: Path, engine: Engine | EngineRef) -> Path:
    """Where the environment of the engine is, or would be."""
    return data / "engines" / f"{engine.kind}-{engine.version}"


def is_installed(data: Path, engine: Engine | EngineRef) -> bool:
    return (engine_dir(data, engine) / COMPLETE).is_file()


def variables(program: str, home: Path) -> dict[str, str]:
    """The environment that a program of an engine gets."""
    found = {name: os.environ[name] for name in INHERITED if name in os.environ}
    # Helpers of the engine (ninja, for one) live beside its python.
    found["PATH"] = f"{Path(program).parent}:{found.get('PATH', os.defpath)}"
    found["HOME"] = str(home)
    found["PYTHONUNBUFFERED"] = "1"
    return found
