"""The options of an engine that no plan gives, with their defaults.

An option is a field of an engine's configuration or an environment variable. Where a plan, a
published config.json or the engine itself may give it another value, it has no default here.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tests.conformance.engine.path_conditions import (
    UNKNOWN,
    Evaluator,
    FunctionNode,
    OneOf,
    conditions,
    join_values,
)

# Where each engine declares its options.
PLACES = {
    "vllm": ("config/*.py", "envs.py"),
    "sglang": ("srt/arg_groups/fields/*.py", "srt/server_args.py", "srt/environ.py"),
}
_WRITES = ("override", "declare", "replace", "update", "setattr")


def defaults(
    package: Path,
    kind: str,
    planned: Collection[str],
    choices: Mapping[str, Collection[Any]],
    files: Collection[str],
) -> dict[str, Any]:
    """The default of each option that is not among `planned`; OneOf: the values that these files of
    the engine give it while the others have their defaults. Of planned ones: their choices."""
    options: dict[str, Any] = {}
    classes: dict[str, set[str]] = {}
    places = [path for pattern in PLACES[kind] for path in sorted(package.glob(pattern))]
    for path in places:
        _declare(ast.parse(path.read_text()), options, classes)
    result = {name: value for name, value in options.items() if not name.startswith("_")}
    for name in planned:
        result[name] = OneOf((*choices[name],)) if choices.get(name) else UNKNOWN
    modules = {file: ast.parse((package / file).read_text()) for file in sorted({*files})}
    functions = single_functions(modules)
    writes = [
        (Evaluator(node, result, None, functions), conditions(node, place), name, value)
        for file, module in modules.items()
        for node, place, name, value in _writes(module, result, package / file in places, classes)
    ]
    before: dict[str, Any] = {}
    while before != result:
        before = dict(result)
        for evaluator, path_conditions, name, value in writes:
            if result[name] is not UNKNOWN and not evaluator.never(path_conditions):
                result[name] = join_values(result[name], evaluator.value(value))
    return {name: value for name, value in result.items() if value is not UNKNOWN}


def single_functions(modules: Mapping[str, ast.Module]) -> dict[str, FunctionNode]:
    """The functions of modules that alone have their name."""
    functions: dict[str, list[FunctionNode]] = {}
    for module in modules.values():
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.setdefault(node.name, []).append(node)
    return {name: nodes[0] for name, nodes in functions.items() if len(nodes) == 1}


def _copies(name: str, value: ast.expr | None) -> bool:
    """Whether the value is that of an option with this name."""
    return isinstance(value, ast.Attribute) and value.attr == name


def _declare(module: ast.Module, defaults: dict[str, Any], classes: dict[str, set[str]]) -> None:
    for node in ast.walk(module):
        block = node.body if isinstance(node, ast.ClassDef | ast.If) else []
        for line in block:
            name, value = _field(line, isinstance(node, ast.ClassDef))
            if not name:
                continue
            if isinstance(node, ast.ClassDef):
                classes.setdefault(name, set()).add(node.name)
            is_unchanged = name not in defaults or defaults[name] == value
            defaults[name] = value if is_unchanged else UNKNOWN


def _field(line: ast.stmt, in_class: bool) -> tuple[str, Any]:
    """The option that this line declares, with its default."""
    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
        return line.target.id, _default(line.value)
    if (
        in_class
        and isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and isinstance(line.value, ast.Call)
        and ast.unparse(line.value.func).startswith("Env")
    ):
        first = line.value.args[0] if line.value.args else None
        return line.targets[0].id, _default(first)
    return "", UNKNOWN


def _default(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Call):
        for word in node.keywords:
            if word.arg == "init":
                return UNKNOWN
        for word in node.keywords:
            if word.arg == "default":
                return _default(word.value)
            if word.arg == "default_factory" and ast.unparse(word.value) in ("list", "dict"):
                return ()
    if isinstance(node, ast.List | ast.Tuple | ast.Dict) and not ast.unparse(node).strip("[](){}"):
        return ()
    return UNKNOWN


def _writes(
    module: ast.Module,
    options: Mapping[str, Any],
    is_owner: bool,
    classes: Mapping[str, set[str]],
) -> list[tuple[FunctionNode, ast.AST, str, ast.expr | None]]:
    """(function, place, option, value) of statements that may change an option after it was given.
    own: whether the classes of this file are the engine's configuration."""
    result: list[tuple[FunctionNode, ast.AST, str, ast.expr | None]] = []

    def visit(node: ast.AST, owner: str, function: FunctionNode | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, child.name, function)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, owner, child)
            else:
                if function is not None:
                    for name, value in _assignments(child, owner, is_owner, classes):
                        if name in options and not _copies(name, value):
                            result.append((function, child, name, value))
                visit(child, owner, function)

    visit(module, "", None)
    return result


def _assignments(
    node: ast.AST, owner: str, is_owner: bool, classes: Mapping[str, set[str]]
) -> list[tuple[str, ast.expr | None]]:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = None if isinstance(node, ast.AugAssign) else node.value
        return [
            (single_target.attr, value)
            for target in targets
            for single_target in (target.elts if isinstance(target, ast.Tuple) else [target])
            if isinstance(single_target, ast.Attribute)
            # A class that has no such option keeps a copy of its own.
            if is_owner
            or not _is_self(single_target.value)
            or owner in classes.get(single_target.attr, ())
        ]
    if isinstance(node, ast.Dict):
        return [
            (key.value, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        ]
    if isinstance(node, ast.Call) and _callee(node).startswith(_WRITES):
        words = [
            arg.value
            for arg in node.args
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
        last = node.args[-1] if node.args else None
        return [
            *((word.arg, word.value) for word in node.keywords if word.arg),
            *((word, last) for word in words),
        ]
    return []


def _callee(node: ast.Call) -> str:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return str(name).lower()


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
