"""The wheel with a compiled data plane answers as the sources do: tests over real sockets run
against it. Compiled functions check the types of their arguments, which the sources do not."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.proxy.workers import channel
from tests.support.paths import ROOT
from tests.support.patience import hang_s

# Kept connections, two workers, and of `test_exchange.py` streams that either side ends; its other
# tests replace classes, which a compiled data plane does not allow.
_TESTS = ("test_exchange.py", "test_head_cache.py", "workers/test_workers.py")
_UNIT_TESTS = (
    "access/test_media_hosts.py",
    "access/test_rate_limits.py",
    "bodies",
    "workers/test_shared_limits.py",
)
_LOCAL_TOPICS = "test_head_cache or test_workers or hundred or framing or idle_connection"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose package is that of the compiled wheel."""
    folder = tmp_path_factory.mktemp("compiled")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    hooks = {**os.environ, "HATCH_BUILD_HOOKS_ENABLE": "true"}
    subprocess.run(command, cwd=ROOT, env=hooks, check=True, timeout=5 * hang_s())
    with zipfile.ZipFile(next(folder.glob("*-cp3*.whl"))) as archive:
        archive.extractall(folder / "tree")
    for name in ("tests", "docker", "docs", "scripts", "examples", "profiles"):
        shutil.copytree(ROOT / name, folder / "tree" / name)
    for path in (*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "compose.yaml"):
        shutil.copy(path, folder / "tree")
    return folder / "tree"


def _run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        check=False,
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=5 * hang_s(),
    )


def test_the_wheel_runs_its_compiled_extensions(tree: Path) -> None:
    extensions = sorted((tree / "gateway").rglob("*.so"))
    names = [
        ".".join(path.relative_to(tree).with_name(path.name.partition(".")[0]).parts)
        for path in extensions
    ]
    assert "gateway.proxy.exchange" in names
    code = f"import importlib\nfor name in {names}: print(importlib.import_module(name).__file__)"
    answer = _run(tree, "-c", code)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == [str(path) for path in extensions]


def test_a_compiled_data_plane_answers_as_the_sources_do(tree: Path) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    paths = [f"tests/local/proxy/{path}" for path in _TESTS]
    answer = _run(tree, *command, "-k", _LOCAL_TOPICS, *paths)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    answer = _run(tree, *command, *(f"tests/unit/proxy/{path}" for path in _UNIT_TESTS))
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]


def _decoded_classes(kind: msgspec.inspect.Type) -> Iterator[type]:
    """The classes that msgspec makes when it decodes this type."""
    parts: list[Any] = [kind]
    while parts:
        part = parts.pop()
        if (part_class := getattr(part, "cls", None)) is not None:
            yield part_class
        parts += [field.type for field in getattr(part, "fields", ())]
        parts += [*getattr(part, "item_types", ()), *getattr(part, "types", ())]
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(part, name):
                parts.append(getattr(part, name))


def test_no_class_that_msgspec_reads_is_compiled() -> None:
    spec = importlib.util.spec_from_file_location("hook", ROOT / "scripts/compiled_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    module_names = {f"gateway.proxy.{module.replace('/', '.')}" for module in hook.MODULES}
    read = {
        decoded_class.__module__
        for message in (channel.ToWorker, channel.FromWorker)
        for decoded_class in _decoded_classes(msgspec.inspect.type_info(message))
    }
    assert "gateway.proxy.routing.model_route" in read
    for name in module_names:
        path = ROOT / f"{name.replace('.', '/')}.py"
        if "(msgspec.Struct" in path.read_text():
            read.add(name)
    assert not module_names & read
