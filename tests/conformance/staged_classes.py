"""The classes of models that a version shares by stages of a pipeline, as its files say.

SGLang's `support_pp` (srt/model_executor/model_runner.py) asks whether a class's forward takes
`pp_proxy_tensors`. vLLM's `supports_pp` (model_executor/models/interfaces.py) asks for
`intermediate_tensors`, and whether the class is a `SupportsPP`. A version without rules has classes
that the one it is forecast by does not know. `scripts/engine-profile` writes the difference.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gateway.domain import Engine
from gateway.domain.profile_diff import ProfileDiff

_TAKES = {"sglang": "pp_proxy_tensors", "vllm": "intermediate_tensors"}
_FOLDERS = {
    "sglang": ("sglang/srt/models",),
    "vllm": ("vllm/model_executor/models", "vllm/models"),
}
_STAGED = "SupportsPP"
_REGISTRY = "vllm/model_executor/models/registry.py"


class _Class(NamedTuple):
    """arguments: the arguments of its own forward, or None."""

    arguments: frozenset[str] | None
    bases: tuple[str, ...]


def with_stages(diff: ProfileDiff, near: Engine, sources: Path) -> ProfileDiff:
    """The difference, with the classes of `sources`, an unpacked wheel, that have no stages."""
    classes: dict[str, _Class] = {}
    for folder in _FOLDERS[diff.kind]:
        classes |= dict(_classes(sources / folder))
    dropped_classes = {*diff.without.get("architectures", ()), *near.no_stages}
    if diff.kind == "vllm":
        registry = _read_registry(sources / _REGISTRY)
        fail = tuple(
            name
            for name in diff.architectures
            if name in registry
            and name not in dropped_classes
            and not _is_staged(registry[name], classes)
        )
        return diff.evolve(no_stages=fail)
    names = (*near.architectures, *diff.architectures)
    takes = _TAKES[diff.kind]
    return diff.evolve(
        no_stages=tuple(
            name
            for name in names
            if name not in dropped_classes and _has_stages(name, classes, takes) is False
        )
    )


def _read_registry(registry: Path) -> dict[str, str]:
    """vLLM's class of each architecture."""
    pairs = re.findall(r'"(\w+)":\s*\(\s*"[\w.]+",\s*"(\w+)",?\s*\)', registry.read_text())
    return dict(pairs)


def _is_staged(name: str, classes: dict[str, _Class]) -> bool:
    return _has_stages(name, classes, _TAKES["vllm"]) is not False and _is_a(name, classes)


def _is_a(name: str, classes: dict[str, _Class], visited: tuple[str, ...] = ()) -> bool:
    """Whether the class has stages' interface among its bases."""
    if name == _STAGED:
        return True
    if name not in classes or name in visited:
        return False
    return any(_is_a(base, classes, (*visited, name)) for base in classes[name].bases)


def _classes(folder: Path) -> Iterator[tuple[str, _Class]]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8-sig")).body:
            if isinstance(node, ast.ClassDef):
                yield node.name, _Class(_arguments(node), tuple(_names(node)))


def _arguments(node: ast.ClassDef) -> frozenset[str] | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "forward":
            return frozenset(argument.arg for argument in (*item.args.args, *item.args.kwonlyargs))
    return None


def _names(node: ast.ClassDef) -> Iterator[str]:
    return (base.id for base in node.bases if isinstance(base, ast.Name))


def _has_stages(
    name: str, classes: dict[str, _Class], takes: str, visited: tuple[str, ...] = ()
) -> bool | None:
    """None: no class of this name, or of its bases, has a forward."""
    if name not in classes or name in visited:
        return None
    definition = classes[name]
    if definition.arguments is not None:
        return takes in definition.arguments
    base_answers = (
        _has_stages(base, classes, takes, (*visited, name)) for base in definition.bases
    )
    return next((answer for answer in base_answers if answer is not None), None)
