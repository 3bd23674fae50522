"""Downloads for questions to engines on this machine, made once: their sources, and an environment
that can import them.

The standard library alone: scripts/engine-answers imports this with a bare Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT


class DownloadFolder(NamedTuple):
    """Downloads that are made once, below one folder."""

    folder: Path

    def sources(self, engine: str, version: str) -> Path:
        """The folder that holds this version's package."""
        folder = self.folder / f"{engine}-{version}"
        self.folder.mkdir(parents=True, exist_ok=True)
        with Path(f"{folder}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # others want it too, and wait until it is whole
            if not folder.is_dir():
                document = tomllib.loads(
                    (ROOT / "tests/conformance/engine/wheels.toml").read_text()
                )
                ref = f"{engine}=={version}"
                pin = f"{ref} {document[ref]['wheel']}" if ref in document else ""
                if not pin:
                    sys.exit(
                        f"{engine} {version} has no section in"
                        " tests/conformance/engine/wheels.toml: add one, with the hashes of its"
                        " wheel"
                    )
                with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
                    requirement = Path(temporary, "requirement.txt")
                    requirement.write_text(pin + "\n")
                    download(temporary, "--require-hashes", "--requirement", str(requirement))
                    with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
                        # The metadata too: a version that cannot be asked for makes vLLM do without
                        # Triton. SGLang looks for its CUDA files.
                        pattern = re.compile(rf"{engine}/.*\.(py|cuh|h)|[^/]*\.dist-info/METADATA")
                        wheel.extractall(
                            Path(temporary, "wheel"),
                            [name for name in wheel.namelist() if pattern.fullmatch(name)],
                        )
                    Path(temporary, "wheel").rename(folder)
        return folder

    def environment(self) -> str:
        """A Python with the packages that the engines' sources import."""
        folder = self._build(
            "asking.txt", lambda folder: venv.create(folder, clear=True, with_pip=True)
        )
        return str(folder / "bin/python")

    def older(self) -> Path:
        """Packages that are laid over the environment for versions before the questions'
        OLDER_BEFORE."""
        return self._build("asking-older.txt", lambda _: None)

    def _build(self, name: str, begin: Callable[[Path], object]) -> Path:
        requirements = ROOT / "requirements" / name
        folder = (
            self.folder
            / f"{requirements.stem}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
        )
        if not (folder / "complete").is_file():  # an installation that was cut off is begun again
            shutil.rmtree(folder, ignore_errors=True)
            begin(folder)
            python = folder / "bin/python"
            where = [] if python.exists() else ["--target", str(folder)]
            installing = str(python) if python.exists() else sys.executable
            pip(
                installing,
                "install",
                "--require-hashes",
                *where,
                "--requirement",
                str(requirements),
            )
            (folder / "complete").touch()
        return folder


def wheel_of(requirement: str, folder: Path) -> Path:
    """The wheel of `NAME==VERSION`, of whichever platform of Linux has one."""
    # Newest first: a wheel may need a newer glibc than this machine has, and is only read.
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)] + [
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
    ]
    options = [word for platform in platforms for word in ("--platform", platform)]
    download(str(folder), "--python-version", "3.12", *options, requirement)
    return next(folder.glob("*.whl"))


def download(folder: str, *arguments: str) -> None:
    pip(sys.executable, "download", "--only-binary", ":all:", "--dest", folder, *arguments)


def pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", *arguments[:1], "--quiet", "--no-deps", *arguments[1:]]
    result = subprocess.run(command, check=False)
    if result.returncode:
        sys.exit(f"pip failed: {' '.join(command)}")
