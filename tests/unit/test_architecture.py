"""The house: a folder is a noun of the product, and imports only what stands below it. The table is the whole permission."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# From the top floor to the ground: a folder (or a module beside the folders) and what it may import of ours. What stands on the
# ground (GROUND) may be imported from everywhere.
ARROWS = {
    "__main__": "cli.verbs cli serve settings",
    "gateway": "planning version",
    "cli.verbs": "export cli core.planner wishes settings store version",
    "cli": "doctor bench demo planning calibration inquiry profiles core.planner core.speed hosts.agent hosts.docker hosts.process store core.facts version machine settings core.failures",
    "doctor": "profiles hosts.agent hosts.docker hosts.process machine core.facts core.speed settings store",
    "serve": "tls tuning events planning calibration inquiry serve.workers catalog serve.page serve.metrics serve.admin serve.proxy controller controller.steps profiles routing access version machine settings hosts.agent hosts.docker hosts.process hosts open_files api shared_memory store wishes supervision",
    "planning": "checking inquiry catalog profiles core.sharing core.planner core.lora core.chat hosts.process core.facts core.speed core.speculative machine settings store own_program",
    "checking": "inquiry core.model",
    "serve.workers": "tls serve.metrics serve.proxy routing access supervision settings api shared_memory",
    "serve.page": "serve.metrics controller controller.fleet routing access",
    "serve.metrics": "serve.admin serve.proxy controller controller.fleet controller.watch core.speed supervision version api machine store",
    "serve.admin": "api events catalog calibration controller controller.fleet profiles core.planner routing access core.facts core settings store wishes version export",
    "serve.proxy": "serve.proxy.bodies tls routing access api",
    "serve.proxy.bodies": "routing access api",
    "events": "controller.fleet controller.watch hosts.process access core supervision machine settings store version",
    "tuning": "controller controller.steps controller.fleet controller.watch core.planner core.speed core.facts supervision store own_program",
    "controller": "controller.steps controller.fleet controller.watch access routing core failpoint machine store core.failures supervision settings",
    "controller.steps": "controller.fleet controller.watch catalog core.chat core.sharing core.planner hosts.process routing core.facts core failpoint machine settings hosts store core.failures",
    "controller.fleet": "controller.watch core.chat core.lora core.sharing core supervision routing store core.failures",
    "controller.watch": "access core.chat core.lora core supervision settings hosts routing store core.failures core.failures.lines",
    "failpoint": "core",
    "bench": "core.speed",
    "calibration": "inquiry profiles core.speed hosts.process core.facts",
    "demo": "health settings store",
    "catalog": "core.lora core.speculative core.model version own_program",
    "profiles": "profile_tables core.engines",
    "profile_tables": "core.chat core.speed core.kernels yaml_cache core.failures",
    "hosts.agent": "core.planner hosts.docker hosts store",
    "core.sharing": "core.planner core.engines core core.speed core.facts core.failures",
    "core.planner": "core core.chat core.lora core.engines core.speed core.facts core.kernels core.speculative core.layers core.quantization core.model",
    "hosts.docker": "inquiry hosts",
    "hosts.process": "hosts inquiry open_files core store own_program",
    "inquiry": "core store",
    "routing": "access api shared_memory",
    "access": "api shared_memory store",
    "core.engines": "core core.chat core.speed core.attention core.facts core.kernels core.speculative core.memory core.layers core.model",
    "core.speed": "core.kernels core.layers core.model",
    "core.attention": "core.rules core.model",
    "core.lora": "core.layers core.model core.model.families",
    "core.facts": "core core.failures core.failures.lines",
    "core.kernels": "core.rules core.model",
    "core.speculative": "core.memory core.layers core.model core.model.families",
    "settings": "core",
    "core": "core.failures",
    "core.memory": "core.layers core.model",
    "core.rules": "core.model",
    "core.layers": "core.quantization core.model core.model.families",
    "core.quantization": "core.model",
    "core.model": "core.model.families",
    "export": "",
    "wishes": "",
    "health": "",
    "inquiry.inside": "",
    "inquiry.inside.measuring": "",
    "tls": "supervision",
    "supervision": "",
    "version": "",
    "machine": "",
    "yaml_cache": "",
    "hosts": "",
    "api": "",
    "shared_memory": "",
    "open_files": "",
    "own_program": "",
    "store": "",
    "core.chat": "",
    "core.failures": "core.failures.lines",
    "core.failures.lines": "",
    "core.model.families": "",
}
GROUND = ("domain", "errors", "keys", "logging", "visible")
MOST_FILES = 16
LONGEST_CHAIN = 16


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name without `gateway.`; the package itself is ""."""
    found = {}
    for path in sorted((root / "gateway").rglob("*.py")):
        parts = path.relative_to(root / "gateway").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules(ROOT)


def imports(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that this one imports, anywhere in it: a late import and one for types alone are arrows too."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] != "gateway":
                continue
            module = name.removeprefix("gateway").lstrip(".")
            while module and module not in known:
                module = module.rpartition(".")[0]
            yield module


def graph() -> dict[str, set[str]]:
    return {name: set(imports(ast.parse(path.read_text()), MODULES)) - {name} for name, path in MODULES.items()}


GRAPH = graph()


def folder(module: str) -> str:
    """The folder that a module stands in; a module directly under gateway/ stands for itself."""
    path = MODULES[module]
    parent = path.parent.relative_to(ROOT / "gateway")
    return ".".join(parent.parts) or module or "gateway"


def arrows() -> dict[tuple[str, str], list[str]]:
    """From folder to folder, and the two files of every import between them."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, targets in GRAPH.items():
        for target in targets:
            ends = folder(module), folder(target)
            if ends[0] != ends[1] and ends[1] not in GROUND:
                files = f"{MODULES[module].relative_to(ROOT)} imports {MODULES[target].relative_to(ROOT)}"
                found.setdefault(ends, []).append(files)
    return found


def test_no_import_goes_where_no_arrow_is_allowed() -> None:
    allowed = {(above, below) for above, row in ARROWS.items() for below in row.split()}
    wrong = [line for ends, lines in arrows().items() if ends not in allowed for line in lines]
    assert not wrong, "\n".join(["not in the table of arrows:", *wrong])


def test_every_arrow_of_the_table_is_used_and_points_down() -> None:
    floors = list(ARROWS)
    known = {folder(module) for module in MODULES}
    assert set(floors) | set(GROUND) == known
    for index, (above, row) in enumerate(ARROWS.items()):
        for below in row.split():
            assert (above, below) in arrows(), f"nothing in {above} imports {below} any more"
            assert below in floors[index + 1 :], f"{below} stands above {above}"


def circles() -> list[list[str]]:
    """Files that import each other, found by taking away again and again those that nothing left imports."""
    left = {name: set(targets) for name, targets in GRAPH.items()}
    while leaves := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in leaves:
            del left[name]
    return [sorted(left)] if left else []


def test_no_files_import_each_other() -> None:
    assert not circles()


def chain(module: str, known: dict[str, list[str]]) -> list[str]:
    """The longest chain of imports that begins with this module."""
    if module not in known:
        below = max((chain(target, known) for target in GRAPH[module]), key=len, default=[])
        known[module] = [module, *below]
    return known[module]


def test_a_chain_of_imports_is_short_enough_to_follow() -> None:
    known: dict[str, list[str]] = {}
    longest = max((chain(module, known) for module in GRAPH), key=len)
    assert len(longest) <= LONGEST_CHAIN, " -> ".join(longest)


@pytest.mark.parametrize("room", sorted({folder(module) for module in MODULES}))
def test_a_folder_holds_few_files(room: str) -> None:
    files = [path for module, path in MODULES.items() if folder(module) == room and path.name != "__init__.py"]
    assert len(files) <= MOST_FILES


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("import gateway.errors", {"errors"}),
        ("from gateway import errors", {"errors"}),
        ("from gateway.domain import Plan", {"domain"}),
        ("def late():\n    from gateway.domain.plan import Plan", {"domain.plan"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gateway.settings import Settings", {"settings"}),
        ("import json", set()),
    ],
)
def test_every_way_to_import_is_seen(code: str, seen: set[str]) -> None:
    assert set(imports(ast.parse(code), MODULES)) == seen
