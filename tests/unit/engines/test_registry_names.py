"""A kind of engine is named in its own folder and in the registry, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.registry import KINDS
from tests.support.paths import ROOT
from tests.support.syntax import nodes_of, package_files

ENGINES = ROOT / "gateway/engines"
HOMES = (ENGINES / "registry.py", *(ENGINES / name for name in KINDS))
# Methods that compare a text with their arguments, or look it up.
COMPARING = {"startswith", "endswith", "get", "removeprefix", "removesuffix", "index", "count"}
PLANNER = ROOT / "gateway/planner"
# Folders of the engines' code, whose places `code_sources` of a kind have; engines/vllm is ours.
PACKAGES = {"vllm", "sglang", "srt"}
PREFIXES = {prefix for entry in KINDS.values() for prefix in entry.kind.env_prefixes}
OF_A_KIND = re.compile(
    rf"(?<![\w/])(?:(?:{'|'.join(PACKAGES)})[/#]\w[\w/.]*|(?:{'|'.join(PREFIXES)})[A-Z]\w+)"
)


def names_in(node: ast.AST) -> set[str]:
    """The kinds that an expression names, alone or in a container."""
    return {
        each_node.value
        for each_node in ast.walk(node)
        if isinstance(each_node, ast.Constant) and isinstance(each_node.value, str)
        if each_node.value.partition("==")[0].rstrip("=") in KINDS
    }


def comparisons(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, set[str]]]:
    """Lines that compare with a kind's name, or look something up by it."""
    for node in nodes:
        names: set[str] = set()
        if isinstance(node, ast.Compare):
            names = names_in(node)
        elif isinstance(node, ast.MatchValue):
            names = names_in(node.value)
        elif isinstance(node, ast.Dict):
            names = set().union(*(names_in(key) for key in node.keys if key is not None))
        elif isinstance(node, ast.Subscript):
            names = names_in(node.slice) if not isinstance(node.ctx, ast.Store) else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in COMPARING:
                names = set().union(*map(names_in, node.args), set())
        elif isinstance(node, (ast.For, ast.comprehension)):
            names = names_in(node.iter)
        if names:
            place: Any = node.iter if isinstance(node, ast.comprehension) else node
            yield place.lineno, names


def files() -> list[Path]:
    return [
        path
        for path in package_files()
        if not any(path == home or home in path.parents for home in HOMES)
    ]


def test_no_code_compares_with_the_name_of_a_kind() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {', '.join(sorted(names))}"
        for path in files()
        for line, names in comparisons(nodes_of(path))
    ]
    assert not wrong, "\n".join(["ask the engine's contract instead:", *wrong])


def test_the_planner_names_no_variable_and_no_source_of_a_kind() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in sorted(PLANNER.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in OF_A_KIND.finditer(line)
    ]
    assert not wrong, "\n".join(["the kind's contract or its code_sources.py has these:", *wrong])


def test_the_sources_of_every_kind_are_in_its_own_code() -> None:
    for name, entry in KINDS.items():
        own_package = f"{name.partition('-')[0]}/"
        for source in entry.kind.code_sources:
            assert source in ("", "planner") or source.startswith(own_package), name
            assert source in ("", "planner") or OF_A_KIND.match(source), source


@pytest.mark.parametrize(
    "text",
    [
        'env.get("VLLM_DISABLED_KERNELS")',
        "# SGLANG_PP_LAYER_PARTITION splits",
        'source = "vllm/platforms/cuda.py"',
        "in srt/server_args.py",
        'source="vllm#49949"',
    ],
)
def test_every_form_of_a_place_or_variable_is_found(text: str) -> None:
    assert OF_A_KIND.search(text)


def test_folders_of_this_package_are_not_places_of_an_engine() -> None:
    assert not OF_A_KIND.search("see engines/vllm/memory.py of vLLM 0.33.0")


def test_no_module_imports_from_the_folder_of_a_kind() -> None:
    folders = [f"gateway.engines.{name}" for name in KINDS]
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}"
        for path in files()
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and node.module
        if any(f"{node.module}.".startswith(f"{folder}.") for folder in folders)
    ]
    assert not wrong


def test_no_kind_imports_from_another() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}"
        for name in KINDS
        for path in sorted((ENGINES / name).rglob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and node.module
        if any(
            other_kind in f".{node.module}.".split(".")
            for other_kind in KINDS
            if other_kind != name and (ENGINES / other_kind).is_dir()
        )
    ]
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        'engine.kind == "vllm"',
        'engine.kind in ("vllm", "sglang")',
        'ref.startswith("sglang==")',
        '{"vllm": 1}',
        'table.get("sglang")',
        'table["sglang"]',
        'for kind in ("vllm", "sglang"):\n    pass',
        'match kind:\n    case "vllm":\n        pass',
    ],
)
def test_every_form_of_comparison_is_found(code: str) -> None:
    assert [*comparisons(ast.walk(ast.parse(code)))]
