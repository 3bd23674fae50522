"""The rooms of the package: each imports only rooms below it. The table is the whole permission."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.syntax import tree_of

# From the top floor to the ground: a room (a folder directly under gateway/) and the rooms that it
# may import. Every room may import BASE, the modules beside the rooms, and `domain`.
ARROWS = {
    "__main__": "server cli",
    "server": (
        "measuring controller hosts planner proxy profiles engines store machine wishes models"
        " diagnosis"
    ),
    "cli": "measuring hosts planner profiles engines store machine wishes diagnosis",
    "measuring": "controller hosts planner profiles engines store diagnosis",
    "controller": "hosts planner proxy engines store machine models diagnosis",
    # The agent checks each start by the planner's flags (hosts/agent/policy.py).
    # Machines of a cluster copy commits of the Hub from each other.
    "hosts": "planner engines store machine models",
    "gateway": "planner",
    "planner": "profiles engines store machine models diagnosis",
    "proxy": "store",
    "profiles": "engines diagnosis",
    "engines": "store models diagnosis",
    "wishes": "",
    "machine": "",
    "models": "",
    "diagnosis": "",
    "store": "",
}
BASE = frozenset(
    [
        "decoding",
        "disk_fault",
        "errors",
        "file_reading",
        "garbage",
        "health",
        "keys",
        "logging",
        "model_folder",
        "secret",
        "settings",
        "supervision",
        "variables",
        "version",
        "visible",
        "worker_process",
    ]
)
GROUND = ("domain", "base")
MAX_FILES = 24
LONGEST_CHAIN = 17


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name without `gateway.`; the package itself is
    ""."""
    modules_by_name = {}
    for path in sorted((root / "gateway").rglob("*.py")):
        parts = path.relative_to(root / "gateway").with_suffix("").parts
        modules_by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules_by_name


MODULES = modules(ROOT)


def for_types(node: ast.AST) -> bool:
    """Whether this is the body of imports that only a type checker reads."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def statements(tree: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    """All statements of a tree, for no expression holds an import; `types`: also those of imports
    for types alone."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr) and (types or not for_types(node)):
            yield node
            yield from statements(node, types=types)


def imports(tree: ast.AST, modules: dict[str, Path], *, types: bool = True) -> Iterator[str]:
    """The modules of ours that this one imports, late imports too. `types`: also imports for types
    alone."""
    for node in statements(tree, types=types):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] != "gateway":
                continue
            module = name.removeprefix("gateway").lstrip(".")
            while module and module not in modules:
                module = module.rpartition(".")[0]
            yield module


def graph(*, types: bool) -> dict[str, set[str]]:
    return {
        name: set(imports(tree_of(path), MODULES, types=types)) - {name}
        for name, path in MODULES.items()
    }


# Rooms know each other by types too; a circle or a chain is one of imports at run time.
GRAPH = graph(types=True)
RUN_TIME = graph(types=False)


def folder(module: str) -> str:
    """The folder that a module stands in, dotted."""
    return ".".join(MODULES[module].parent.relative_to(ROOT / "gateway").parts)


def room(module: str) -> str:
    """The room of a module: the folder directly under gateway/ that holds it, or `base`."""
    first = module.partition(".")[0] or "gateway"
    return "base" if first in BASE else first


def arrows() -> dict[tuple[str, str], list[str]]:
    """From room to room, and the two files of every import between them."""
    places: dict[tuple[str, str], list[str]] = {}
    for module, targets in GRAPH.items():
        for target in targets:
            ends = room(module), room(target)
            if ends[0] != ends[1] and ends[1] not in GROUND:
                files = (
                    f"{MODULES[module].relative_to(ROOT)} imports"
                    f" {MODULES[target].relative_to(ROOT)}"
                )
                places.setdefault(ends, []).append(files)
    return places


def test_no_import_goes_where_no_arrow_is_allowed() -> None:
    arrows_allowed = {(above, below) for above, row in ARROWS.items() for below in row.split()}
    wrong = [
        line for ends, lines in arrows().items() if ends not in arrows_allowed for line in lines
    ]
    assert not wrong, "\n".join(["not in the table of arrows:", *wrong])


def test_every_arrow_of_the_table_is_used_and_points_down() -> None:
    floors = list(ARROWS)
    rooms = {room(module) for module in MODULES}
    assert set(floors) | set(GROUND) == rooms
    for index, (above, row) in enumerate(ARROWS.items()):
        for below in row.split():
            assert (above, below) in arrows(), f"nothing in {above} imports {below} any more"
            assert below in floors[index + 1 :], f"{below} stands above {above}"


def circles() -> list[list[str]]:
    """Files that import each other, found by taking away again and again those that nothing left
    imports."""
    targets_by_name = {name: set(targets) for name, targets in RUN_TIME.items()}
    while leaves := [
        name for name, targets in targets_by_name.items() if not targets & targets_by_name.keys()
    ]:
        for name in leaves:
            del targets_by_name[name]
    return [sorted(targets_by_name)] if targets_by_name else []


def test_no_files_import_each_other() -> None:
    assert not circles()


def chain(module: str, imports_by_module: dict[str, list[str]]) -> list[str]:
    """The longest chain of imports that begins with this module."""
    if module not in imports_by_module:
        below = max(
            (chain(target, imports_by_module) for target in RUN_TIME[module]), key=len, default=[]
        )
        imports_by_module[module] = [module, *below]
    return imports_by_module[module]


def test_a_chain_of_imports_is_short_enough_to_follow() -> None:
    chains: dict[str, list[str]] = {}
    longest = max((chain(module, chains) for module in RUN_TIME), key=len)
    assert len(longest) <= LONGEST_CHAIN, " -> ".join(longest)


@pytest.mark.parametrize("name", sorted({folder(module) for module in MODULES}))
def test_a_folder_holds_few_files(name: str) -> None:
    files = [
        path
        for module, path in MODULES.items()
        if folder(module) == name and path.name != "__init__.py"
    ]
    assert len(files) <= MAX_FILES, (
        f"gateway/{name.replace('.', '/')} has {len(files)} files, and a folder holds {MAX_FILES}."
        " Put files of one subject into a subfolder with its own __init__.py, and their tests into"
        " the same subfolder of tests; or add the new code to an existing file."
    )


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import gateway.errors", {"errors"}),
        ("from gateway import errors", {"errors"}),
        ("from gateway.domain import Plan", {"domain"}),
        ("def late():\n    from gateway.domain.plan import Plan", {"domain.plan"}),
        (
            (
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gateway.settings"
                " import Settings"
            ),
            {"settings"},
        ),
        ("import json", set()),
    ],
)
def test_every_way_to_import_is_seen(code: str, modules: set[str]) -> None:
    assert set(imports(ast.parse(code), MODULES)) == modules


def test_an_import_for_types_alone_is_none_at_run_time() -> None:
    code = "if TYPE_CHECKING:\n    from gateway.settings import Settings\nimport gateway.errors"
    assert set(imports(ast.parse(code), MODULES, types=False)) == {"errors"}
