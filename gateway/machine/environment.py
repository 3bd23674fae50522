"""Engines that are installed on this machine: each version in a virtual environment of its own,
DATA_DIR/engines/KIND-VERSION/."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from gateway.domain import Engine, EngineRef
from gateway.variables import INHERITED

COMPLETE = ".complete"
"""A file that is written last, so that an installation which was cut off is not taken for a whole
environment."""


def engine_dir(data: Path, engine: Engine | EngineRef) -> Path:
    """Where the environment of the engine is, or would be."""
    return data / "engines" / f"{engine.kind}-{engine.version}"


def is_installed(data: Path, engine: Engine | EngineRef) -> bool:
    """A foreign environment counts while it has the version that it had when it was taken."""
    try:
        _, *foreign = (engine_dir(data, engine) / COMPLETE).read_text().splitlines()
    except (OSError, ValueError):
        # An empty file says as much as the engine's name.
        return (engine_dir(data, engine) / COMPLETE).is_file()
    return not foreign or all(Path(path).exists() for path in foreign)


def installed(data: Path) -> frozenset[str]:
    """The engines whose environments are whole, as `kind-version`."""
    try:
        return frozenset(
            one.name for one in (data / "engines").iterdir() if (one / COMPLETE).is_file()
        )
    except OSError:
        return frozenset()


def foreign_python(folder: Path) -> str | None:
    """The Python of the environment that was taken as it is, where the engine's folder stands for
    such a one."""
    try:
        return (folder / COMPLETE).read_text().splitlines()[1]
    except (OSError, IndexError):
        return None


def note_foreign(folder: Path, ref: str, python: Path, package: str) -> None:
    """The folder stands for an environment that belongs to somebody else: its `bin/python` is that
    one, and nothing else is in it. package: the folder of
    the engine's version there, which goes with the version."""
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True, exist_ok=True)
    # No link: Python finds its environment by the path that it was started as.
    program.write_text(
        f'#!/bin/sh\nPATH={shlex.quote(str(python.parent))}:"$PATH" exec {shlex.quote(str(python))}'
        ' "$@"\n'
    )
    program.chmod(0o755)
    (folder / COMPLETE).write_text(f"{ref}\n{python}\n{package}\n")


def variables(program: str, home: Path) -> dict[str, str]:
    """The environment that a program of an engine gets."""
    found = {name: os.environ[name] for name in INHERITED if name in os.environ}
    # Helpers of the engine (ninja, for one) live beside its python.
    found["PATH"] = f"{Path(program).parent}:{found.get('PATH', os.defpath)}"
    found["HOME"] = str(home)
    found["PYTHONUNBUFFERED"] = "1"
    return found
