"""The names of options and of their inner fields that the planner's code can give an engine.

They are the words of the planner's sources: more than any plan gives, and never fewer.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Sequence
from typing import Any

from tests.support.paths import ROOT

_PLANNER = ("gateway/planner", "gateway/engines", "gateway/models")


def planned_names() -> set[str]:
    """With underscores in place of dashes, without leading dashes."""
    paths = [path for folder in _PLANNER for path in (ROOT / folder).rglob("*.py")]
    return {
        node.value.lstrip("-").replace("-", "_")
        for path in paths
        if "inside" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def is_planned(argv: Sequence[str], variables: Collection[str], planned: Collection[str]) -> bool:
    """Whether the planner knows each option of this start, and each field within its JSON."""
    names = {*variables}
    for word in argv:
        name, _, value = word.partition("=")
        names.add(name.removeprefix("--").replace("-", "_").removeprefix("no_"))
        if value.startswith(("{", "[")):
            names |= {key.replace("-", "_") for key in keys(json.loads(value))}
    return names <= {*planned}


def keys(value: Any) -> set[str]:
    """The keys of all mappings in a JSON value."""
    if isinstance(value, list):
        return {name for item in value for name in keys(item)}
    if isinstance(value, dict):
        return {*value, *(name for item in value.values() for name in keys(item))}
    return set()
