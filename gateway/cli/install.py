"""`fitserve engine install`: an engine in a virtual environment of its own, made with uv.

Where an engine's profile has a lock file, exactly its packages are installed, each checked against its hash. uv
uses the package sources that pip is configured with (index, find-links, certificate).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.domain import Engine, Install
from gateway.domain.units import GIB
from gateway.errors import BadRequest, FitserveError
from gateway.hosts.process.environment import COMPLETE, engine_dir, is_installed
from gateway.profiles import Profiles
from gateway.settings import Settings

# A CPU engine takes 2.4 GiB on disk, and uv keeps a second copy in its cache while it works.
_ROOM_BYTES = 6 * GIB
# In the environment: what uv is told to leave out.
_WITHOUT = "without.txt"


class InstallFailed(FitserveError):
    """uv could not build the environment; what it printed says why."""

    code = "install_failed"


def install(engine: Engine, profiles: Profiles, settings: Settings, say: Callable[[str], None]) -> Path:
    """The environment's folder, built unless it is complete already. Raises BadRequest, InstallFailed."""
    folder = engine_dir(settings.data, engine)
    if engine.install is None:
        raise BadRequest(
            f"{engine.ref} has no recipe for an environment of its own.", hint=f"It runs in its container image {engine.image}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(settings.data, engine):
            return folder
        free = shutil.disk_usage(folder).free
        if free < _ROOM_BYTES:
            raise InstallFailed(
                f"Installing {engine.ref} needs {_ROOM_BYTES >> 30} GiB, and {free >> 30} GiB are free at {folder}.",
                hint="Free space or move FITSERVE_DATA_DIR.",
            )
        say(f"Installing {engine.ref} into {folder}")
        sources = package_sources()
        environment = {**os.environ, **sources}
        uv = find_uv()
        _run([uv, "venv", "--quiet", "--clear", "--python", engine.install.python, str(folder)], environment)
        without = (f"{package}; sys_platform == 'never'\n" for package in engine.install.without)
        (folder / _WITHOUT).write_text("".join(without))
        _run([uv, *pip_arguments(engine.install, profiles.install_file(engine), folder, sources)], environment)
        _run(
            [str(folder / "bin" / "python"), "-c", f"import {engine.install.module}"],
            {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": str(Path.home())},
        )
        (folder / COMPLETE).write_text(engine.ref + "\n")
    return folder


def find_uv() -> str:
    """The program uv: beside this Python, or on PATH. Raises BadRequest."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise BadRequest(
            "uv, which builds the environments of engines, is not here.", hint="Install it: pip install 'fitserve[process]'."
        )
    return found


def pip_arguments(recipe: Install, lock_file: Path | None, folder: Path, sources: Mapping[str, str]) -> list[str]:
    """The arguments of uv that install `recipe` into `folder`."""
    arguments = ["pip", "install", "--python", str(folder / "bin" / "python"), "--link-mode", "hardlink"]
    if not sys.stderr.isatty():
        # Without a terminal there is no progress to show, only 150 lines of names.
        arguments.append("--quiet")
    if "UV_INDEX" in sources:
        # Pinned hashes say which file is meant, so it does not matter which index has it.
        arguments += ["--index-strategy", "unsafe-best-match"]
    if lock_file is not None:
        arguments += ["--require-hashes", "--no-deps", "-r", str(lock_file)]
    elif recipe.without:
        arguments += ["--overrides", str(folder / _WITHOUT)]
    arguments += recipe.packages
    if recipe.torch_backend and not _has_torch(sources.get("UV_FIND_LINKS", "")):
        arguments += ["--torch-backend", recipe.torch_backend]
    return arguments


def package_sources() -> dict[str, str]:
    """uv's environment variables for the sources that pip is configured with; uv's own settings win."""
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "cert": "SSL_CERT_FILE",
    }
    pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    found: dict[str, str] = {}
    for line in pip.stdout.splitlines():
        match = re.fullmatch(r"[^.]*\.([\w-]+)='(.*)'", line)
        if match and match[1] in names:
            found[names[match[1]]] = " ".join(match[2].replace("\\n", " ").split())
    for option, name in names.items():
        # In an environment without pip, the variables that configure pip still count.
        if value := os.environ.get(f"PIP_{option.upper().replace('-', '_')}"):
            found[name] = value
    return {name: value for name, value in found.items() if value and name not in os.environ}


def _has_torch(find_links: str) -> bool:
    return any(list(Path(place).glob("torch-*.whl")) for place in find_links.split() if Path(place).is_dir())


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    if subprocess.run(command, env=dict(environment), check=False).returncode != 0:
        raise InstallFailed(
            f"`{' '.join(command[:3])}` failed; the lines above say why.", hint="Mend that and run the installation again."
        )
