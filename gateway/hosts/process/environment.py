"""Engines that are installed on this machine: each version in a virtual environment of its own, DATA_DIR/engines/KIND-VERSION/."""

from __future__ import annotations

from pathlib import Path

from gateway.domain import Engine, EngineRef

COMPLETE = ".complete"
"""A file that is written last, so that an installation which was cut off is not taken for a whole environment."""


def engine_dir(data: Path, engine: Engine | EngineRef) -> Path:
    """Where the environment of the engine is, or would be."""
    return data / "engines" / f"{engine.kind}-{engine.version}"


def is_installed(data: Path, engine: Engine | EngineRef) -> bool:
    return (engine_dir(data, engine) / COMPLETE).is_file()
