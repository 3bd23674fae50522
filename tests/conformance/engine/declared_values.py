"""Values that an engine's modules and typed configurations declare: constants, Literals, bounds.

The standard library alone reads the sources.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

from tests.conformance.engine.path_conditions import UNKNOWN, LowerBound, OneOf


@cache
def constants(package: Path, file: str, *, imports: bool = True) -> dict[str, Any]:
    """The constants of a module that its conditions look into: Literals, collections and keys of
    mappings. imports: also those of modules that it imports them from, each of which is read once.
    """
    module = ast.parse((package / file).read_text())
    result: dict[str, Any] = {}
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and (value := _constant(node.value)) is not UNKNOWN:
                    result[target.id] = value
        elif imports and isinstance(node, ast.ImportFrom) and node.module:
            path = "/".join(node.module.split(".")[1:]) + ".py"
            if node.level == 0 and (package / path).is_file():
                constant_values = constants(package, path, imports=False)
                names = {alias.asname or alias.name: alias.name for alias in node.names}
                result |= {
                    constant: constant_values[name]
                    for constant, name in names.items()
                    if name in constant_values
                }
    return result


def typed_fields(module: ast.Module, values_by_name: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """By class and field: the values that a class, whose types pydantic checks, lets a field have.
    values_by_name: constants of the module."""
    result = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and _is_checked(node):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    value = _cast(line, values_by_name)
                    if value is not UNKNOWN:
                        result[node.name, line.target.id] = value
    return result


def _is_checked(node: ast.ClassDef) -> bool:
    names = [ast.unparse(expression) for expression in (*node.decorator_list, *node.bases)]
    return any(name.partition("(")[0] in ("config", "BaseModel") for name in names)


def _cast(line: ast.AnnAssign, values_by_name: dict[str, Any]) -> Any:
    values: list[Any] = []
    for part in _parts(line.annotation):
        text = ast.unparse(part)
        if text == "None":
            values.append(None)
        elif text.startswith("Literal[") and isinstance(part, ast.Subscript):
            values += _literal(part)
        elif isinstance(values_by_name.get(text), tuple) and text.isidentifier():
            values += values_by_name[text]
        elif text in ("int", "float") and isinstance(line.value, ast.Call):
            bounds = {keyword.arg: keyword.value for keyword in line.value.keywords}
            limit = bounds.get("gt")
            if not isinstance(limit, ast.Constant):
                return UNKNOWN
            values.append(LowerBound(float(limit.value)))  # type: ignore[arg-type]
        else:
            return UNKNOWN
    return OneOf(tuple(values)) if len(values) > 1 else values[0]


def _parts(node: ast.expr) -> list[ast.expr]:
    """The types of a union."""
    if isinstance(node, ast.BinOp):
        return [*_parts(node.left), *_parts(node.right)]
    return [node]


def _literal(node: ast.Subscript) -> list[Any]:
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return [element.value for element in inner if isinstance(element, ast.Constant)]


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        return tuple(_literal(node))
    if isinstance(node, ast.Dict):
        return _values_of(list(node.keys))
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("frozenset", "set", "tuple"):
        return _constant(node.args[0]) if node.args else ()
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return _values_of(list(node.elts))
    return UNKNOWN


def _values_of(nodes: list[ast.expr | None]) -> Any:
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return tuple(values) if len(values) == len(nodes) else UNKNOWN
