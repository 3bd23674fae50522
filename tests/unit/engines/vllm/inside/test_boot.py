"""Stand-ins for extensions that an installed vLLM cannot load here."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.engines.inside import stubs
from gateway.engines.vllm.inside import boot

INTERFACE = """
try:
    import kernels.extension
    is_there = True
except ImportError:
    is_there = False
"""
PACKAGE = """
from kernels.interface import is_there
if not is_there:
    raise ImportError("the extension is missing")
"""


@pytest.fixture
def kernels_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package `kernels`, which is forgotten after the test."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == folder.name]:
        del sys.modules[name]


def test_a_package_that_failed_without_its_extension_imports_with_a_stand_in(
    kernels_folder: Path,
) -> None:
    """Source: vllm/vllm_flash_attn/__init__.py of 0.26.0."""
    for name, text in (("interface", INTERFACE), ("__init__", PACKAGE)):
        (kernels_folder / f"{name}.py").write_text(text)

    assert not boot._imports("kernels.extension")
    stubs.stand_in({"kernels.extension"})

    assert importlib.import_module("kernels").is_there
