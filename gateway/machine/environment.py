"""Installed engines: a virtual environment for each version in DATA_DIR/engines/KIND-VERSION/."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from gateway.domain import Engine, EngineRef
from gateway.variables import INHERITED

COMPLETE = ".complete"
"""A file that is written last: without it the installation is incomplete."""


def engine_dir(data: Path, engine: Engine | EngineRef) -> Path:
    """The folder of the engine's environment, installed or not."""
    return data / "engines" / f"{engine.kind}-{engine.version}"


def is_installed(data: Path, engine: Engine | EngineRef) -> bool:
    """Whether the engine is installed. A foreign environment must still have its first version."""
    try:
        _, *foreign = (engine_dir(data, engine) / COMPLETE).read_text().splitlines()
    except (OSError, ValueError):
        # An empty file still marks a complete installation.
        return (engine_dir(data, engine) / COMPLETE).is_file()
    return not foreign or all(Path(path).exists() for path in foreign)


def installed(data: Path) -> frozenset[str]:
    """The engines with complete environments, as `kind-version`."""
    try:
        return frozenset(
            folder.name for folder in (data / "engines").iterdir() if (folder / COMPLETE).is_file()
        )
    except OSError:
        return frozenset()


def foreign_python(folder: Path) -> str | None:
    """The Python of the foreign environment that the engine's folder stands for; None: its own."""
    try:
        return (folder / COMPLETE).read_text().splitlines()[1]
    except (OSError, IndexError):
        return None


def note_foreign(folder: Path, ref: str, python: Path, package: str) -> None:
    """Let the folder stand for a foreign environment: its `bin/python` starts the other Python.

    package: the folder of the engine's version there, which is gone after an upgrade.
    """
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True, exist_ok=True)
    # A link would not do: Python finds its environment by the path of its start.
    program.write_text(
        f'#!/bin/sh\nPATH={shlex.quote(str(python.parent))}:"$PATH" exec {shlex.quote(str(python))}'
        ' "$@"\n'
    )
    program.chmod(0o755)
    (folder / COMPLETE).write_text(f"{ref}\n{python}\n{package}\n")


def variables(program: str, home: Path) -> dict[str, str]:
    """The environment variables for a program of an engine."""
    env = {name: os.environ[name] for name in INHERITED if name in os.environ}
    # Helpers of the engine (such as ninja) are beside its python.
    env["PATH"] = f"{Path(program).parent}:{env.get('PATH', os.defpath)}"
    env["HOME"] = str(home)
    env["PYTHONUNBUFFERED"] = "1"
    return env
