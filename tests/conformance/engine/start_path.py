"""The refusals in an engine's start path: each `raise` of a function that a start enters or calls.

A refusal counts as one of a configuration unless its own code says that no configuration of this
machine leads to it (`Refusal.kind`). The standard library alone reads the sources.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

# Conditions on the platform: the start is on NVIDIA GPUs.
_PLATFORM = re.compile(
    r"is_(rocm|cpu|xpu|tpu|hip|npu|musa|hpu|mps|mlx|out_of_tree|unspecified|cuda_alike|cuda)\b"
    r"|rocm|xpu|npu|musa|aiter|on_gfx|is_sm\d|sys\.platform|get_device_capability|is_blackwell",
    re.IGNORECASE,
)
# Conditions on packages and versions that are installed beside the engine.
_PACKAGE = re.compile(
    r"find_spec|has_\w+\(\)|is_\w+_available\(|HAS_\w+|_available\b|_installed|version\(|_or_newer"
)
_ELSEWHERE = re.compile(
    r"Import|ModuleNotFound|OSError|HTTP|Timeout|Connection|EntryNotFound|RepositoryNotFound"
    r"|AttributeError|StopIteration"
)
_PROTOCOLS = ("__getattr__", "__getattribute__", "__getitem__", "__init_subclass__", "__new__")


class Function(NamedTuple):
    file: str
    owner: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    raises: list[ast.Raise]

    @property
    def first(self) -> int:
        """The first line, as a code object has it."""
        decorators = self.node.decorator_list
        return decorators[0].lineno if decorators else self.node.lineno


class Refusal(NamedTuple):
    """kind: config, or why no configuration leads to it: platform, package, protocol, abstract,
    elsewhere (another error of a file, a package or a network), internal (no input of its
    conditions is a setting)."""

    place: str
    function: str
    kind: str
    text: str


def refusals(
    package: Path, entered: Collection[tuple[str, int]], settings: Collection[str]
) -> list[Refusal]:
    """The refusals of functions that starts entered (file, first line), and of the functions that
    these call by names which are certain.

    settings: names of flags, of fields of config.json and of the engine's configurations.
    """
    files = sorted({file for file, _ in entered if (package / file).is_file()})
    functions = [one for file in files for one in _functions(package, file)]
    begun = [one for one in functions if (one.file, one.first) in entered]
    return [
        Refusal(
            f"{one.file}:{statement.lineno}",
            f"{one.owner}.{one.node.name}".lstrip("."),
            _kind(one, statement, settings),
            ast.unparse(statement)[:200],
        )
        for one in [*begun, *_called(functions, begun)]
        for statement in one.raises
    ]


def fields(folder: Path) -> set[str]:
    """Names of the public fields of the classes in this folder."""
    classes = (
        node
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    return {
        line.target.id
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if not line.target.id.startswith("_")
    }


def _functions(package: Path, file: str) -> list[Function]:
    result: list[Function] = []

    def visit(node: ast.AST, owner: str, function: Function | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                result.append(own := Function(file, owner, child, []))
                visit(child, owner, own)
            elif isinstance(child, ast.ClassDef):
                visit(child, child.name, None)
            else:
                if isinstance(child, ast.Raise) and function is not None:
                    function.raises.append(child)
                visit(child, owner, function)

    visit(ast.parse((package / file).read_text()), "", None)
    return result


def _called(functions: list[Function], begun: list[Function]) -> list[Function]:
    """Functions that a start can call though none of the starts did."""
    by_name: dict[str, list[Function]] = defaultdict(list)
    for one in functions:
        by_name[one.node.name].append(one)
    known, result, open_ones = {id(one) for one in begun}, [], [*begun]
    while open_ones:
        caller = open_ones.pop()
        for node in ast.walk(caller.node):
            if not isinstance(node, ast.Call):
                continue
            for one in _targets(caller, node.func, by_name):
                if id(one) not in known:
                    known.add(id(one))
                    result.append(one)
                    open_ones.append(one)
    return result


def _targets(
    caller: Function, called: ast.expr, by_name: dict[str, list[Function]]
) -> list[Function]:
    """A function of the same file or of one that alone has the name; a method of the same class."""
    if isinstance(called, ast.Name):
        alike = [one for one in by_name.get(called.id, ()) if not one.owner]
        return [one for one in alike if one.file == caller.file] or alike[: len(alike) == 1]
    if not isinstance(called, ast.Attribute):
        return []
    alike = by_name.get(called.attr, [])
    if isinstance(called.value, ast.Name) and called.value.id in ("self", "cls"):
        return [one for one in alike if (one.file, one.owner) == (caller.file, caller.owner)]
    return alike[: len(alike) == 1]


def _kind(function: Function, statement: ast.Raise, settings: Collection[str]) -> str:
    said = ast.unparse(statement.exc) if statement.exc else ""
    guards = [*_guards(function.node, statement)]
    tests = " ; ".join(ast.unparse(one.test) for one in guards if isinstance(one, ast.If))
    caught = [one for one in guards if isinstance(one, ast.ExceptHandler)]
    if function.node.name in _PROTOCOLS:
        return "protocol"
    if not tests and said.startswith("NotImplementedError") and not caught:
        return "abstract"
    if _PLATFORM.search(tests):
        return "platform"
    if _PACKAGE.search(tests) or said.startswith(("ImportError", "ModuleNotFoundError")):
        return "package"
    if any(
        statement.exc is None
        or isinstance(statement.exc, ast.Name)
        or _ELSEWHERE.search(_type(one))
        for one in caught
    ):
        return "elsewhere"
    return "internal" if _inputs(function, guards).isdisjoint(settings) else "config"


def _inputs(function: Function, guards: list[ast.AST]) -> set[str]:
    """The names and words in the conditions, and in what the function assigns to such names."""
    conditions = [
        getattr(one, name, None) for one in guards for name in ("test", "iter", "subject")
    ]
    result = {word for one in conditions if one is not None for word in _words(one)}
    assigned = [
        node
        for node in ast.walk(function.node)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None
    ]
    for _ in range(2):
        for node in assigned:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(result & _words(target) for target in targets):
                result |= _words(node.value) if node.value is not None else set()
    return result


def _words(node: ast.AST) -> set[str]:
    result = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            result.add(part.attr)
        elif isinstance(part, ast.Name):
            result.add(part.id)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            result.add(part.value)
    return result


def _type(handler: ast.ExceptHandler) -> str:
    return ast.unparse(handler.type) if handler.type else ""


def _guards(node: ast.AST, statement: ast.Raise) -> Iterator[ast.AST]:
    """The nodes around the statement, from outside."""
    for child in ast.iter_child_nodes(node):
        if any(one is statement for one in ast.walk(child)):
            yield child
            yield from _guards(child, statement)
