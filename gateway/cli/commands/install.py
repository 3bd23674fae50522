"""`fitserve engine install`: an engine in a virtual environment of its own, made with uv.

Where an engine's profile has a lock file, exactly its packages are installed, each checked against
its hash. uv uses the package sources that pip is configured with (index, find-links, certificate).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.domain import Engine, Install
from gateway.domain.units import GIB
from gateway.errors import BadRequest, Conflict, FitserveError
from gateway.machine.environment import (
    COMPLETE,
    engine_dir,
    foreign_python,
    is_installed,
    note_foreign,
)
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings

# A CPU engine takes 2.4 GiB on disk, and uv keeps a second copy in its cache while it works.
_ROOM_BYTES = 6 * GIB
# In the environment: what uv is told to leave out.
_WITHOUT = "without.txt"


class InstallFailed(FitserveError):
    """uv could not build the environment; what it printed says why."""

    code = "install_failed"


def install(
    engine: Engine,
    profiles: Profiles,
    settings: Settings,
    say: Callable[[str], None],
    wheels: Path | None = None,
) -> Path:
    """The environment's folder, built unless it is complete already. wheels: a folder that has all
    of them; no index is asked then. Raises BadRequest,
    InstallFailed."""
    recipe, folder = _recipe(engine), engine_dir(settings.data, engine)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(settings.data, engine):
            return folder
        free = shutil.disk_usage(folder).free
        if free < _ROOM_BYTES:
            raise InstallFailed(
                f"Installing {engine.ref} needs {_ROOM_BYTES >> 30} GiB, and {free >> 30} GiB are"
                f" free at {folder}.",
                hint="Free space or move FITSERVE_DATA_DIR.",
            )
        say(f"Installing {engine.ref} into {folder}: some GiB, and some minutes")
        sources = _sources(wheels)
        environment = {**os.environ, **sources}
        made, filled, proven = _commands(
            recipe, profiles.install_file(engine), folder, sources, wheels
        )
        uv = find_uv()
        _run([uv, *made], environment)
        (folder / _WITHOUT).write_text(_left_out(recipe))
        if wheels is None:
            _run([uv, *filled], environment)
        else:
            _run_from(wheels, [uv, *filled], environment)
        _run(proven, {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": str(Path.home())})
        (folder / COMPLETE).write_text(engine.ref + "\n")
    return folder


def script(
    engine: Engine, profiles: Profiles, settings: Settings, wheels: Path | None = None
) -> str:
    """The same as a shell script that needs uv and nothing of ours: the packages and their hashes
    are in it. Raises BadRequest."""
    recipe, folder, sources = _recipe(engine), engine_dir(settings.data, engine), _sources(wheels)
    lock_file = profiles.install_file(engine)
    lock = folder / "lock.txt"
    made, filled, proven = _commands(
        recipe, lock if lock_file is not None else None, folder, sources, wheels
    )
    written = {folder / _WITHOUT: _left_out(recipe)} | (
        {lock: lock_file.read_text()} if lock_file is not None else {}
    )
    return "\n".join(
        [
            "#!/bin/sh",
            "set -eu",
            *(f"export {name}={shlex.quote(value)}" for name, value in sources.items()),
            shlex.join(["mkdir", "-p", str(folder.parent)]),
            shlex.join(["uv", *made]),
            *(_here_document(path, text) for path, text in written.items()),
            shlex.join(["uv", *filled]),
            shlex.join(proven),
            _here_document(folder / COMPLETE, f"{engine.ref}\n"),
        ]
    )


def _here_document(path: Path, text: str) -> str:
    return f"cat > {shlex.quote(str(path))} <<'END'\n{text}END"


def _recipe(engine: Engine) -> Install:
    if engine.install is None:
        raise BadRequest(
            f"{engine.ref} has no recipe for an environment of its own.",
            hint=f"It runs in its container image {engine.image}.",
        )
    return engine.install


def _commands(
    recipe: Install,
    lock_file: Path | None,
    folder: Path,
    sources: Mapping[str, str],
    wheels: Path | None,
) -> tuple[list[str], list[str], list[str]]:
    """What makes the environment, and what fills it, for uv; and a program that shows that the
    engine is there."""
    made = ["venv", "--quiet", "--clear", "--python", recipe.python, str(folder)]
    proven = [str(folder / "bin" / "python"), "-c", f"import {recipe.module}"]
    return made, pip_arguments(recipe, lock_file, folder, sources, wheels), proven


def _left_out(recipe: Install) -> str:
    return "".join(f"{package}; sys_platform == 'never'\n" for package in recipe.without)


def _sources(wheels: Path | None) -> dict[str, str]:
    """Where uv takes packages from, as its environment variables."""
    return (
        package_sources() if wheels is None else {"UV_OFFLINE": "1", "UV_PYTHON_DOWNLOADS": "never"}
    )


def find_uv() -> str:
    """The program uv: beside this Python, or on PATH. Raises BadRequest."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise BadRequest(
            "uv, which builds the environments of engines, is not here.",
            hint="Install it: pip install 'fitserve[process]'.",
        )
    return found


def pip_arguments(
    recipe: Install,
    lock_file: Path | None,
    folder: Path,
    sources: Mapping[str, str],
    wheels: Path | None = None,
) -> list[str]:
    """The arguments of uv that install `recipe` into `folder`."""
    arguments = [
        "pip",
        "install",
        "--python",
        str(folder / "bin" / "python"),
        "--link-mode",
        "hardlink",
    ]
    # Its progress is 150 lines of names.
    arguments.append("--quiet")
    if "UV_INDEX" in sources:
        # Pinned hashes say which file is meant, so it does not matter which index has it.
        arguments += ["--index-strategy", "unsafe-best-match"]
    if lock_file is not None:
        arguments += ["--require-hashes", "--no-deps", "-r", str(lock_file)]
    elif recipe.without:
        arguments += ["--overrides", str(folder / _WITHOUT)]
    arguments += recipe.packages
    if wheels is not None:
        return [*arguments, "--no-index", "--find-links", str(wheels)]
    if recipe.torch_backend and not _has_torch(sources.get("UV_FIND_LINKS", "")):
        arguments += ["--torch-backend", recipe.torch_backend]
    return arguments


def package_sources() -> dict[str, str]:
    """uv's environment variables for the sources that pip is configured with; uv's own settings
    win."""
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "cert": "SSL_CERT_FILE",
    }
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
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
    return any(
        list(Path(place).glob("torch-*.whl"))
        for place in find_links.split()
        if Path(place).is_dir()
    )


def take(engine: Engine, python: Path, settings: Settings) -> Path:
    """The engine's folder, which stands for an environment that exists: nothing in that is changed,
    now or later. Raises BadRequest, InstallFailed,
    Conflict."""
    # Not resolved: the link in an environment says which environment it is.
    python = Path(os.path.abspath(python.expanduser()))  # noqa: PTH100
    if not os.access(python, os.X_OK) or python.is_dir():
        raise BadRequest(
            f"{python} is no program.",
            hint="Give the Python of an environment, such as VENV/bin/python.",
        )
    module = engine.install.module if engine.install is not None else engine.kind
    asked = subprocess.run(
        [str(python), "-P", "-c", _ASKS, module],
        capture_output=True,
        text=True,
        check=False,
        env=_plain(python),
        cwd="/",
    )
    if asked.returncode != 0:
        last = asked.stderr.strip().rpartition("\n")[2]
        raise InstallFailed(
            f"{python} cannot import {module}: {last}.",
            hint="Give the Python of an environment that has it.",
        )
    version, package = json.loads(asked.stdout.rpartition("\n")[2])
    if version not in (engine.version, None) and version.partition("+")[0] != engine.version:
        raise InstallFailed(
            f"{python} has {module} {version}, and {engine.ref} was asked for.",
            hint=(
                f"`fitserve engine install {engine.kind}=={version.partition('+')[0]} --python"
                f" {python}` takes that one."
            ),
        )
    folder = engine_dir(settings.data, engine)
    if is_installed(settings.data, engine) and foreign_python(folder) is None:
        raise Conflict(
            f"{engine.ref} is installed in {folder} already.",
            hint=f"`fitserve engine rm {engine.ref}` first.",
        )
    shutil.rmtree(folder, ignore_errors=True)
    note_foreign(folder, engine.ref, python, package)
    return folder


# The version of a module's package, and the folder that says it. Its last line: what is imported
# may print.
_ASKS = """
import importlib, importlib.metadata, json, os, sys
importlib.import_module(sys.argv[1])
name = importlib.metadata.packages_distributions()[sys.argv[1]][0]
found = importlib.metadata.distribution(name)
os.write(1, b"\\n" + json.dumps([found.version, str(found._path)]).encode())
"""


def _plain(python: Path) -> dict[str, str]:
    return {
        "PATH": f"{python.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "HOME": str(Path.home()),
    }


def _run_from(wheels: Path, command: list[str], environment: Mapping[str, str]) -> None:
    """uv, which says in a sentence of its own what the folder does not have."""
    if not wheels.is_dir():
        raise BadRequest(f"There is no folder {wheels}.", hint="`--from` takes a folder of wheels.")
    done = subprocess.run(
        command, env=dict(environment), check=False, stderr=subprocess.PIPE, text=True
    )
    if done.returncode == 0:
        return
    words = " ".join(done.stderr.split())
    missing = next((found[1] for one in _MISSING if (found := re.search(one, words))), None)
    told = (
        f"{wheels} has no wheel of {missing} for this Python and machine"
        if missing
        else f"uv says: {words[-500:]}"
    )
    raise InstallFailed(
        f"{told}.",
        hint=(
            f"Add it to the folder (`pip download {missing or 'NAME'} -d FOLDER` where there is a"
            " network), and run this again."
        ),
    )


_MISSING = (
    r"Because there is no version of (\S+) and",
    r"Because (\S+) was not found in the provided package locations",
    r"Because only (\S+) is available",
    r"Because only the following versions of (\S+) are available",
    r"Because (\S+) has no wheels",
)


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    if subprocess.run(command, env=dict(environment), check=False).returncode != 0:
        raise InstallFailed(
            f"`{' '.join(command[:3])}` failed; the lines above say why.",
            hint="Mend that and run the installation again.",
        )
