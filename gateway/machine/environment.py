"""Installed engines: a virtual environment for each version in DATA_DIR/engines/KIND-VERSION/."""

from __future__ import annotations

import hashlib
import os
import shlex
from contextlib import suppress
from pathlib import Path

from gateway.domain import Engine, EngineRef
from gateway.variables import INHERITED_VARIABLES

COMPLETE = ".complete"
"""A file that is written last: without it the installation is incomplete."""


def engine_dir(data: Path, engine: Engine | EngineRef) -> Path:
    """The folder of the engine's environment, installed or not."""
    return data / "engines" / f"{engine.kind}-{engine.version}"


def is_installed(data: Path, engine: Engine | EngineRef) -> bool:
    """Whether the engine is installed. A foreign environment must still have its first version."""
    try:
        _, *required_paths = (engine_dir(data, engine) / COMPLETE).read_text().splitlines()
    except (OSError, ValueError):
        # An empty file still marks a complete installation.
        return (engine_dir(data, engine) / COMPLETE).is_file()
    return not required_paths or all(
        Path(required_path).exists() for required_path in required_paths
    )


def installed_engines(data: Path) -> frozenset[str]:
    """The engines with complete environments, as `kind-version`."""
    try:
        return frozenset(
            folder.name for folder in (data / "engines").iterdir() if (folder / COMPLETE).is_file()
        )
    except OSError:
        return frozenset()


def has_package(folder: Path, package: str) -> bool:
    """Whether the environment in the folder has this path below its site-packages."""
    return any(folder.glob(f"lib/python3.*/site-packages/{package}"))


def foreign_python(folder: Path) -> str | None:
    """The Python of the foreign environment that the engine's folder stands for; None: its own."""
    try:
        return (folder / COMPLETE).read_text().splitlines()[1]
    except (OSError, IndexError):
        return None


def packages_identity(folder: Path) -> str:
    """A digest of the packages that are installed in the foreign environment of the engine's
    folder, by names, versions and times of installation; "" for an environment of its own.

    Raises OSError.
    """
    try:
        package = (folder / COMPLETE).read_text().splitlines()[2]
    except IndexError:
        return ""
    # Pure packages and others can be in two folders.
    package_folder = Path(package).parent
    kinds = [
        package_folder.parents[2] / lib / package_folder.parent.name / package_folder.name
        for lib in ("lib", "lib64")
    ]
    folders = {path.resolve() for path in (package_folder, *kinds) if path.is_dir()}
    records = [
        (entry.name, _record_time(Path(entry.path)))
        for path in sorted(folders)
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name)
        if entry.name.endswith((".dist-info", ".egg-info", ".egg-link", ".pth"))
    ]
    return hashlib.sha256(repr(records).encode()).hexdigest()[:16]


def _record_time(path: Path) -> int:
    """When the list of a package's files was written; of a file, its own time; 0: never."""
    for file in (path / "RECORD", path):
        with suppress(OSError):
            return file.stat().st_mtime_ns
    return 0


def link_foreign(folder: Path, ref: str, python: Path, package: str) -> None:
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
    env = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    # Helpers of the engine (such as ninja) are next to its python.
    env["PATH"] = f"{Path(program).parent}:{env.get('PATH', os.defpath)}"
    env["HOME"] = str(home)
    env["PYTHONUNBUFFERED"] = "1"
    return env
