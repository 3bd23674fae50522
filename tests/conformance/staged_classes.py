"""The classes of models that an SGLang version shares by stages of a pipeline, as its files say.

`support_pp` in srt/model_executor/model_runner.py asks whether a class's forward takes
`pp_proxy_tensors`. A version without rules has classes that the one it is forecast by does not
know. `scripts/engine-profile` writes the difference.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gateway.domain import Engine
from gateway.domain.profile_diff import ProfileDiff

_TAKES = "pp_proxy_tensors"


class _Class(NamedTuple):
    """arguments: of its own forward, or None."""

    arguments: frozenset[str] | None
    bases: tuple[str, ...]


def with_stages(diff: ProfileDiff, near: Engine, sources: Path) -> ProfileDiff:
    """The difference, with the classes of `sources`, an unpacked wheel, that have no stages."""
    classes = dict(_classes(sources / "sglang/srt/models"))
    gone = {*diff.without.get("architectures", ()), *near.no_stages}
    names = (*near.architectures, *diff.architectures)
    fail = (name for name in names if name not in gone and _has_stages(name, classes) is False)
    return diff.evolve(no_stages=tuple(fail))


def _classes(folder: Path) -> Iterator[tuple[str, _Class]]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8-sig")).body:
            if isinstance(node, ast.ClassDef):
                yield node.name, _Class(_arguments(node), tuple(_names(node)))


def _arguments(node: ast.ClassDef) -> frozenset[str] | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "forward":
            return frozenset(each.arg for each in (*item.args.args, *item.args.kwonlyargs))
    return None


def _names(node: ast.ClassDef) -> Iterator[str]:
    return (base.id for base in node.bases if isinstance(base, ast.Name))


def _has_stages(name: str, classes: dict[str, _Class], seen: tuple[str, ...] = ()) -> bool | None:
    """None: no class of this name, or of its bases, has a forward."""
    if name not in classes or name in seen:
        return None
    found = classes[name]
    if found.arguments is not None:
        return _TAKES in found.arguments
    told = (_has_stages(base, classes, (*seen, name)) for base in found.bases)
    return next((answer for answer in told if answer is not None), None)
