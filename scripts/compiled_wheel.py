"""Build hook: a wheel of this platform, with the data plane as C extensions of the same sources.

    HATCH_BUILD_HOOKS_ENABLE=true python -m hatchling build -t wheel

It needs a C compiler and the packages of requirements/dev.txt: mypyc checks the types of the
compiled modules. Without the variable the wheel is pure, and both answer alike. A compiled function
checks the types of its arguments, so stand-ins of tests must be of the declared classes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The modules that a request and a chunk run through. msgspec reads the types of fields, which a
# compiled class does not keep, so modules with decoded classes stay out.
MODULES = (
    "client_answer",
    "client_connection",
    "data_plane",
    "engine_request",
    "exchange",
    "head_cache",
    "heads",
    "meter",
    "queue_wait",
    "request_reader",
    "upload",
    "upstream_connection",
    "upstream_pool",
    "access/media_hosts",
    "access/rate_limits",
    "access/scopes",
    "api/endpoints",
    "api/protocol",
    "api/stream_end",
    "bodies/body_budget",
    "bodies/media_urls",
    "bodies/request_body",
    "metrics/access_log",
    "metrics/counters",
    "metrics/usage_counter",
    "routing/balance",
    "routing/queue",
    "routing/route_table",
    "routing/routes",
    "workers/published_routes",
    "workers/shared_limits",
    "workers/shared_routes",
)
_SETUP = """
from mypyc.build import mypycify
from setuptools import setup

flags = ["--config-file", "mypy.ini", *{files!r}]
setup(
    name="fitserve-data-plane",
    packages=[],
    ext_modules=mypycify(flags, opt_level="3", debug_level="0", group_name="fitserve"),
)
"""
# Code that mypyc compiles may return values of packages without types.
_TYPES = """
[mypy]
strict = True
warn_return_any = False
plugins = pydantic.mypy
[mypy-pynvml.*,torch.*,vllm.*]
ignore_missing_imports = True
"""


def compile_into(folder: Path, root: Path) -> list[Path]:
    """The extension modules of the package of `root`, relative to `folder`, which gets a copy.

    Raises CalledProcessError with the compiler's messages on standard error.
    """
    shutil.copytree(root / "gateway", folder / "gateway", ignore=_no_caches)
    files = [f"gateway/proxy/{module}.py" for module in MODULES]
    (folder / "setup.py").write_text(_SETUP.format(files=files))
    (folder / "mypy.ini").write_text(_TYPES)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return [
        path.relative_to(folder)
        for path in sorted(folder.rglob("*.so"))
        if path.relative_to(folder).parts[0] != "build"
    ]


def _no_caches(_: str, names: list[str]) -> set[str]:
    return {name for name in names if name == "__pycache__"}


class CustomBuildHook(BuildHookInterface[Any]):
    """hatchling looks for this name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        self._folder = tempfile.mkdtemp(prefix="fitserve-compiled-")
        folder = Path(self._folder)
        for path in compile_into(folder, Path(self.root)):
            build_data["force_include"][str(folder / path)] = str(path)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        del build_data, artifact_path
        if version == "standard":
            shutil.rmtree(self._folder)
