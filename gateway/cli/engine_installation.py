"""`fitserve engine install`: an engine in its own virtual environment, made with uv.

With a lock file, exactly its packages are installed and checked against their hashes. uv uses the
package sources of pip's configuration: index, find-links and certificate.
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

from gateway.cli.package_downloads import run_uv
from gateway.domain import Engine, Install
from gateway.domain.units import GIB
from gateway.errors import BadRequest, Conflict, FitserveError
from gateway.machine.environment import (
    COMPLETE,
    engine_dir,
    foreign_python,
    is_installed,
    link_foreign,
)
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings

# A CPU engine takes 2.4 GiB of disk, and uv keeps a second copy in its cache during the work.
_FREE_BYTES = 6 * GIB
_MESSAGE_CHARACTERS = 500
_SHOWN_VERSIONS = 12
# File in the environment with the packages that uv leaves out.
_OVERRIDES_FILE = "without.txt"


class InstallFailedError(FitserveError):
    """uv could not build the environment; its output has the reason."""

    code = "install_failed"


def install(
    engine: Engine,
    profiles: Profiles,
    settings: Settings,
    say: Callable[[str], None],
    wheels: Path | None = None,
) -> Path:
    """Build the environment unless it is complete. Returns its folder. wheels: a folder with all
    wheels, used instead of an index. Raises BadRequest, InstallFailedError."""
    recipe = _install_recipe(engine)
    folder = engine_dir(settings.data, engine)
    if wheels is None and not is_installed(settings.data, engine):
        _check_packages(engine, recipe, profiles)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(settings.data, engine):
            return folder
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < _FREE_BYTES:
            raise InstallFailedError(
                f"Installing {engine.ref} needs {_FREE_BYTES >> 30} GiB, but only"
                f" {free_bytes >> 30} GiB are free at {folder}.",
                hint="Free disk space, or set FITSERVE_DATA_DIR to a larger disk.",
            )
        say(f"Installing {engine.ref} into {folder}. This takes minutes and several GiB of disk.")
        sources = _package_sources(wheels)
        environment = {**os.environ, **sources}
        create, fill, verify = _commands(
            recipe, profiles.install_file(engine), folder, sources, wheels
        )
        uv = find_uv()
        _run_command([uv, *create], environment)
        (folder / _OVERRIDES_FILE).write_text(_overrides_text(recipe))
        _fill([uv, *fill], environment, engine.ref, wheels)
        say(f"Importing {recipe.module} of {engine.ref} for the first time.")
        _run_command(
            verify, {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": str(Path.home())}
        )
        (folder / COMPLETE).write_text(engine.ref + "\n")
    return folder


def _check_packages(engine: Engine, recipe: Install, profiles: Profiles) -> None:
    """Ask the package sources for the engine itself, before anything is made. Packages of a lock
    file are known to exist. Raises InstallFailedError."""
    if profiles.install_file(engine) is not None:
        return
    environment = {**os.environ, **package_sources(), "UV_PYTHON_DOWNLOADS": "never"}
    command = ["pip", "compile", "--quiet", "--no-deps", "--python-version"]
    answer = subprocess.run(
        [find_uv(), *command, recipe.python, "-"],
        input="\n".join(recipe.packages),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    missing_package = _missing_package(answer.stderr) if answer.returncode else None
    if missing_package is None:
        return  # any other problem is that of the installation, which reports it
    versions = _available_versions(re.split(r"[\[=<>!~]", missing_package)[0])
    raise InstallFailedError(
        f"{engine.ref} cannot be installed: no package source has {missing_package}.",
        hint=f"Take one of the versions that exist: {versions}."
        if versions
        else "`fitserve engine ls` lists the versions that are known here.",
    )


def _available_versions(package: str) -> str:
    """The newest versions of a package, as pip lists them; "": pip does not know."""
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", package],
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"^Available versions: (.+)$", pip.stdout, re.MULTILINE)
    return ", ".join(match[1].split(", ")[:_SHOWN_VERSIONS]) if match else ""


def script(
    engine: Engine, profiles: Profiles, settings: Settings, wheels: Path | None = None
) -> str:
    """The installation as a shell script that needs only uv; packages and hashes are in it. Raises
    InstallFailedError."""
    recipe = _install_recipe(engine)
    folder = engine_dir(settings.data, engine)
    sources = _package_sources(wheels)
    lock_file = profiles.install_file(engine)
    lock = folder / "lock.txt"
    create, fill, verify = _commands(
        recipe, lock if lock_file is not None else None, folder, sources, wheels
    )
    files = {folder / _OVERRIDES_FILE: _overrides_text(recipe)} | (
        {lock: lock_file.read_text()} if lock_file is not None else {}
    )
    return "\n".join(
        [
            "#!/bin/sh",
            "set -eu",
            *(f"export {name}={shlex.quote(value)}" for name, value in sources.items()),
            shlex.join(["mkdir", "-p", str(folder.parent)]),
            shlex.join(["uv", *create]),
            *(_here_document(path, text) for path, text in files.items()),
            # The progress of uv is 150 lines of names.
            shlex.join(["uv", *fill, "--quiet"]),
            shlex.join(verify),
            _here_document(folder / COMPLETE, f"{engine.ref}\n"),
        ]
    )


def _here_document(path: Path, text: str) -> str:
    return f"cat > {shlex.quote(str(path))} <<'END'\n{text}END"


def _install_recipe(engine: Engine) -> Install:
    if engine.install is None:
        raise InstallFailedError(
            f"{engine.ref} cannot be installed without Docker.",
            hint=f"Run it in its container image {engine.image}.",
        )
    return engine.install


def _commands(
    recipe: Install,
    lock_file: Path | None,
    folder: Path,
    sources: Mapping[str, str],
    wheels: Path | None,
) -> tuple[list[str], list[str], list[str]]:
    """Arguments of uv that create and fill the environment, and a command that imports the
    engine."""
    create = ["venv", "--quiet", "--clear", "--python", recipe.python, str(folder)]
    verify = [str(folder / "bin" / "python"), "-c", f"import {recipe.module}"]
    return create, pip_arguments(recipe, lock_file, folder, sources, wheels), verify


def _overrides_text(recipe: Install) -> str:
    return "".join(f"{package}; sys_platform == 'never'\n" for package in recipe.excluded_packages)


def _package_sources(wheels: Path | None) -> dict[str, str]:
    """The package sources as environment variables of uv."""
    return (
        package_sources() if wheels is None else {"UV_OFFLINE": "1", "UV_PYTHON_DOWNLOADS": "never"}
    )


def find_uv() -> str:
    """The path of uv: next to this Python, or on PATH. Raises InstallFailedError."""
    bundled_uv = Path(sys.executable).parent / "uv"
    program = str(bundled_uv) if bundled_uv.is_file() else shutil.which("uv")
    if program is None:
        raise InstallFailedError(
            "The program uv, which builds the environments of engines, was not found.",
            hint="Run `pip install '.[process]'` in a clone of the repository.",
        )
    return program


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
    if "UV_INDEX" in sources:
        # Hashes pin each file, so any index may provide it.
        arguments += ["--index-strategy", "unsafe-best-match"]
    if lock_file is not None:
        arguments += ["--require-hashes", "--no-deps", "-r", str(lock_file)]
    elif recipe.excluded_packages:
        arguments += ["--overrides", str(folder / _OVERRIDES_FILE)]
    arguments += recipe.packages
    if wheels is not None:
        return [*arguments, "--no-index", "--find-links", str(wheels)]
    if recipe.torch_backend and not _has_torch(sources.get("UV_FIND_LINKS", "")):
        arguments += ["--torch-backend", recipe.torch_backend]
    return arguments


def package_sources() -> dict[str, str]:
    """Environment variables of uv for pip's package sources. Variables of uv that are set win."""
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "cert": "SSL_CERT_FILE",
    }
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    variables: dict[str, str] = {}
    for line in pip.stdout.splitlines():
        match = re.fullmatch(r"[^.]*\.([\w-]+)='(.*)'", line)
        if match and match[1] in names:
            variables[names[match[1]]] = " ".join(match[2].replace("\\n", " ").split())
    for option, name in names.items():
        # An environment without pip still has the variables that configure pip.
        if value := os.environ.get(f"PIP_{option.upper().replace('-', '_')}"):
            variables[name] = value
    return {name: value for name, value in variables.items() if value and name not in os.environ}


def _has_torch(find_links: str) -> bool:
    return any(
        list(Path(link).glob("torch-*.whl")) for link in find_links.split() if Path(link).is_dir()
    )


def adopt_environment(engine: Engine, python: Path, settings: Settings) -> Path:
    """Register an existing environment as the engine's, without changing it. Returns the engine's
    folder. Raises BadRequest, InstallFailedError, Conflict."""
    # The path is not resolved: the link in an environment identifies the environment.
    python = Path(os.path.abspath(python.expanduser()))  # noqa: PTH100
    if not os.access(python, os.X_OK) or python.is_dir():
        raise BadRequest(
            f"{python} is not a program.",
            hint="Name the Python of an environment, such as VENV/bin/python.",
        )
    module = engine.install.module if engine.install is not None else engine.kind
    answer = subprocess.run(
        [str(python), "-P", "-c", _VERSION_SCRIPT, module],
        capture_output=True,
        text=True,
        check=False,
        env=_plain_environment(python),
        cwd="/",
    )
    if answer.returncode != 0:
        last = answer.stderr.strip().rpartition("\n")[2]
        raise InstallFailedError(
            f"{python} cannot import {module}: {last}.",
            hint="Name the Python of an environment with this package.",
        )
    version, package = json.loads(answer.stdout.rpartition("\n")[2])
    if version not in (engine.version, None) and version.partition("+")[0] != engine.version:
        raise InstallFailedError(
            f"{python} has {module} {version}, not {engine.ref}.",
            hint=(
                f"`fitserve engine install {engine.kind}=={version.partition('+')[0]} --python"
                f" {python}` registers this version."
            ),
        )
    folder = engine_dir(settings.data, engine)
    if is_installed(settings.data, engine) and foreign_python(folder) is None:
        raise Conflict(
            f"{engine.ref} is already installed in {folder}.",
            hint=f"Run `fitserve engine rm {engine.ref}` first.",
        )
    shutil.rmtree(folder, ignore_errors=True)
    link_foreign(folder, engine.ref, python, package)
    return folder


# Prints the version and the folder of a module's package on the last line: imports may print too.
_VERSION_SCRIPT = """
import importlib, importlib.metadata, json, os, sys
importlib.import_module(sys.argv[1])
name = importlib.metadata.packages_distributions()[sys.argv[1]][0]
package = importlib.metadata.distribution(name)
os.write(1, b"\\n" + json.dumps([package.version, str(package._path)]).encode())
"""


def _plain_environment(python: Path) -> dict[str, str]:
    return {
        "PATH": f"{python.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "HOME": str(Path.home()),
    }


def _fill(
    command: list[str], environment: Mapping[str, str], title: str, wheels: Path | None
) -> None:
    """Run uv, with a bar for its downloads. wheels: a folder with all wheels; an error then names
    the missing package."""
    if wheels is not None and not wheels.is_dir():
        raise BadRequest(f"There is no folder {wheels}.", hint="`--from` takes a folder of wheels.")
    message = run_uv(command, environment, title)
    if not message:
        return
    if wheels is None:
        raise InstallFailedError(
            f"uv could not install {title}: {' '.join(message.split())[-_MESSAGE_CHARACTERS:]}",
            hint="Fix the problem and repeat the installation.",
        )
    text = " ".join(message.split())
    missing_module = _missing_package(message)
    reason = (
        f"{wheels} has no wheel of {missing_module} for this Python and machine"
        if missing_module
        else f"uv says: {text[-_MESSAGE_CHARACTERS:]}"
    )
    raise InstallFailedError(
        f"{reason}.",
        hint=(
            f"Run `pip download {missing_module or 'NAME'} -d FOLDER` on a machine with a network,"
            " add the wheel to the folder, and repeat the command."
        ),
    )


def _missing_package(message: str) -> str | None:
    """The package that uv did not find, by its message; None: uv names none."""
    text = " ".join(message.split())
    matches = (re.search(pattern, text) for pattern in _MISSING_PACKAGE)
    return next((match[1] for match in matches if match), None)


_MISSING_PACKAGE = (
    r"Because there is no version of (\S+) and",
    r"Because (\S+) was not found in the provided package locations",
    r"Because only (\S+) is available",
    r"Because only the following versions of (\S+) are available",
    r"Because (\S+) has no wheels",
)


def _run_command(command: list[str], environment: Mapping[str, str]) -> None:
    if subprocess.run(command, env=dict(environment), check=False).returncode != 0:
        raise InstallFailedError(
            f"`{' '.join(command[:3])}` failed; the lines above have the reason.",
            hint="Fix the problem and repeat the installation.",
        )
