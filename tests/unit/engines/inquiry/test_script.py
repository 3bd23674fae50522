"""The script inside an engine: nothing but itself, and no code of a model."""

from __future__ import annotations

import ast
import io
import sys
import zipfile
from pathlib import Path

import pytest

from gateway.engines.inquiry import script
from tests.support.paths import ROOT

# An inquiry sends these. The process host runs its own from their folder.
INSIDE = sorted(
    path
    for path in (ROOT / "gateway").glob("**/inside/*.py")
    if not path.is_relative_to(ROOT / "gateway" / "hosts")
)


@pytest.mark.parametrize("path", INSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_script_imports_the_standard_library_and_its_own_files_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert str(node.module).partition(".")[0] in sys.stdlib_module_names


def test_the_sent_script_is_a_length_and_those_files() -> None:
    length, _, rest = script.pack().partition(b"\n")
    assert int(length) == len(rest)
    with zipfile.ZipFile(io.BytesIO(rest)) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    texts = {f"inside/{path.relative_to(ROOT / 'gateway')}": path.read_text() for path in INSIDE}
    assert {name: text for name, text in files.items() if text} == texts


def test_the_script_is_the_same_every_time_so_that_answers_are_found_again() -> None:
    first = script.pack()
    script.pack.cache_clear()
    assert script.pack() == first


def test_the_script_allows_no_code_of_a_model() -> None:
    for path in INSIDE:
        assert "trust_remote_code" not in path.read_text()
