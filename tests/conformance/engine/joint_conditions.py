"""Whether the conditions of a statement can be met together: no values of its variables may do it.

The standard library alone reads the sources.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from tests.conformance.engine.path_conditions import (
    Evaluator,
    FunctionNode,
    OneOf,
    block_of,
    truths,
)

_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
# Calls that change no variable.
_PURE = {
    "isinstance",
    "issubclass",
    "len",
    "getattr",
    "hasattr",
    "str",
    "int",
    "bool",
    "type",
    "set",
    "get_args",
    "sorted",
    "max",
    "min",
    "any",
    "all",
    "tuple",
    "list",
    "dict",
    "range",
    "repr",
    "print",
}
_POSITIVE = {ast.IsNot: ast.Is, ast.NotEq: ast.Eq, ast.NotIn: ast.In}
_MAX_VALUES, _MAX_ATOMS = 512, 10
_ANY = "*"


class Step(NamedTuple):
    """A test on the way to a statement. assignments: how often each name was assigned before."""

    test: ast.expr
    holds: bool
    assignments: Mapping[str, int]


class Atom(NamedTuple):
    """A part of a test that has no parts. negated: against its text."""

    node: ast.expr
    text: str
    negated: bool


def are_contrary(evaluator: Evaluator, node: FunctionNode, statement: ast.AST) -> bool:
    """Whether no values of the variables meet all tests on the way to the statement."""
    steps = list(_steps(node, statement, Counter()))
    atoms = [(atom, step) for step in steps for atom in _atoms(step.test)]
    variables = dict(
        variable for atom, step in atoms for variable in _variables(evaluator, atom, step)
    )
    names, choices = [*variables], [*variables.values()]
    if _size(choices) > _MAX_VALUES:
        names, choices = [], []
    return all(
        not _is_possible(evaluator, steps, atoms, dict(zip(names, row, strict=True)))
        for row in product(*choices)
    )


def _is_possible(
    evaluator: Evaluator,
    steps: list[Step],
    atoms: list[tuple[Atom, Step]],
    assumed: Mapping[tuple[str, int], Any],
) -> bool:
    """Whether some truths of the atoms meet all tests, for these values of variables."""
    truths_by_key: dict[tuple[str, int], set[bool]] = {}
    for atom, step in atoms:
        evaluator.assumed = {
            name: value for (name, version), value in assumed.items()
            if version == _version(name, step)
        }  # fmt: skip
        values = {truth is not atom.negated for truth in truths(evaluator.value(atom.node))}
        key = atom.text, _version(atom.text, step)
        truths_by_key[key] = truths_by_key.get(key, {True, False}) & values
    evaluator.assumed = {}
    if not all(truths_by_key.values()):
        return False
    open_ones = [key for key, values in truths_by_key.items() if len(values) > 1]
    if len(open_ones) > _MAX_ATOMS:
        return True
    certain = {key: next(iter(values)) for key, values in truths_by_key.items() if len(values) == 1}
    return any(
        _agrees(whole := {**certain, **dict(zip(open_ones, row, strict=True))})
        and all(_holds(step.test, step, whole) is step.holds for step in steps)
        for row in product((True, False), repeat=len(open_ones))
    )


def _agrees(whole: Mapping[tuple[str, int], bool]) -> bool:
    """Whether no variable is None and true at once."""
    return not any(
        holds and text.endswith(" is None") and whole.get((text.removesuffix(" is None"), version))
        for (text, version), holds in whole.items()
    )


def _holds(node: ast.expr, step: Step, whole: Mapping[tuple[str, int], bool]) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _holds(node.operand, step, whole)
    if isinstance(node, ast.BoolOp):
        parts = [_holds(value, step, whole) for value in node.values]
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    atom = _atom(node)
    return whole[atom.text, _version(atom.text, step)] is not atom.negated


def _atoms(node: ast.expr) -> Iterator[Atom]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _atoms(node.operand)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _atoms(value)
    else:
        yield _atom(node)


def _atom(node: ast.expr) -> Atom:
    """The test, with the text of its positive form."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        positive = _POSITIVE.get(type(node.ops[0]))
        if positive is not None:
            comparison = ast.Compare(node.left, [positive()], node.comparators)
            return Atom(node, ast.unparse(comparison), True)
    return Atom(node, ast.unparse(node), False)


def _variables(
    evaluator: Evaluator, atom: Atom, step: Step
) -> Iterator[tuple[tuple[str, int], tuple[Any, ...]]]:
    """The variables of the test with few values, by name and version."""
    for node in ast.walk(atom.node):
        if isinstance(node, ast.Name | ast.Attribute):
            value = evaluator.value(node)
            if isinstance(value, OneOf):
                name = ast.unparse(node)
                yield (name, _version(name, step)), value.values


def _version(text: str, step: Step) -> int:
    """How often the names in the text were written before the test."""
    names = {part for part in _words(text) if part in step.assignments}
    version_value = step.assignments.get(_ANY, 0) if "." in text or "(" in text else 0
    return version_value + sum(step.assignments[name] for name in names)


def _words(text: str) -> set[str]:
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(ast.parse(text, mode="eval"))
        if isinstance(node, ast.Name | ast.Attribute)
    }


def _size(choices: list[tuple[Any, ...]]) -> int:
    result = 1
    for choice in choices:
        result *= len(choice)
    return result


def _steps(node: ast.AST, statement: ast.AST, writes: Counter[str]) -> Iterator[Step]:
    """The tests on the way to the statement, and of statements before it that end the block."""
    if isinstance(node, ast.For | ast.While):
        writes = writes + _writes(node)
    inner_block = block_of(statement, node)
    if inner_block is None:
        return
    field, block, place = inner_block
    if isinstance(node, ast.If | ast.While) and field in ("body", "orelse"):
        yield Step(node.test, field == "body", writes)
    if isinstance(node, ast.Try) and field != "body":
        writes = writes + _writes(node)
    for earlier_statement in [] if field == "handlers" else block[:place]:
        yield from _pass_steps(earlier_statement, writes)
        writes = writes + _writes(earlier_statement)
    yield from _steps(block[place], statement, writes)


def _pass_steps(node: ast.stmt, writes: Counter[str]) -> Iterator[Step]:
    if isinstance(node, ast.If):
        if isinstance(node.body[-1], _ENDS):
            yield Step(node.test, False, writes)
        if node.orelse and isinstance(node.orelse[-1], _ENDS):
            yield Step(node.test, True, writes)
    elif isinstance(node, ast.Assert):
        yield Step(node.test, True, writes)


def _writes(node: ast.AST) -> Counter[str]:
    """The names that a statement writes where it goes on; _ANY: a call may write any attribute."""
    result: Counter[str] = Counter()
    open_ones = [node]
    while open_ones:
        open_node = open_ones.pop()
        if isinstance(open_node, ast.If):
            parts = [
                block
                for block in (open_node.body, open_node.orelse)
                if not (block and _ends(block[-1]))
            ]
            open_ones += [open_node.test, *(part for block in parts for part in block)]
            continue
        if isinstance(open_node, ast.Name | ast.Attribute) and isinstance(open_node.ctx, ast.Store):
            result[open_node.id if isinstance(open_node, ast.Name) else open_node.attr] += 1
        if isinstance(open_node, ast.Call) and not _is_pure(open_node):
            result[_ANY] += 1
        open_ones += ast.iter_child_nodes(open_node)
    return result


def _ends(statement: ast.stmt) -> bool:
    return isinstance(statement, _ENDS)


def _is_pure(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in _PURE
    return ast.unparse(call.func).startswith(("logger.", "self.logger."))
