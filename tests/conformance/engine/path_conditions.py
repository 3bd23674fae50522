"""The conditions under which a statement of a function is reached, and their values where some
names have known values: true, false or unknown.

The standard library alone reads the sources.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

UNKNOWN: Any = object()
_KINDS: dict[str, type] = {
    "str": str, "int": int, "bool": bool, "float": float, "type": type, "torch.dtype": type,
}  # fmt: skip
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


class Condition(NamedTuple):
    """The statement is reached where `test` is `holds`."""

    test: ast.expr
    holds: bool


def conditions(node: ast.AST, statement: ast.AST) -> list[Condition]:
    """Around the statement, and of statements before it that end the function or the loop."""
    result: list[Condition] = []
    inner_block = block_of(statement, node)
    if inner_block is None:
        return [*result, *_inside(node, statement)]
    field, block, place = inner_block
    if isinstance(node, ast.If | ast.While) and field in ("body", "orelse"):
        result.append(Condition(node.test, field == "body"))
    for earlier_statement in block[:place]:
        result += _exit_conditions(earlier_statement)
    return [*result, *conditions(block[place], statement)]


def block_of(statement: ast.AST, node: ast.AST) -> tuple[str, list[Any], int] | None:
    """The field and the block of a node in which the statement stands, and its place there."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        block = getattr(node, field, None)
        for place, candidate in enumerate(block if isinstance(block, list) else []):
            if is_part(statement, candidate):
                return field, list(block or ()), place
    return None


def is_part(statement: ast.AST, node: ast.AST) -> bool:
    """Whether the statement is the node or a part of it."""
    return any(each_node is statement for each_node in ast.walk(node))


def _exit_conditions(node: ast.stmt) -> Iterator[Condition]:
    """The conditions after a statement that may end the block."""
    if isinstance(node, ast.If):
        if isinstance(node.body[-1], _ENDS):
            yield Condition(node.test, holds=False)
        if node.orelse and isinstance(node.orelse[-1], _ENDS):
            yield Condition(node.test, holds=True)
    elif isinstance(node, ast.Assert):
        yield Condition(node.test, holds=True)


def _inside(node: ast.AST, statement: ast.AST) -> Iterator[Condition]:
    """Conditions within an expression: `a and call()`, `call() if a else b`."""
    for each_node in ast.walk(node):
        if isinstance(each_node, ast.BoolOp):
            place = next(
                (i for i, part in enumerate(each_node.values) if is_part(statement, part)), 0
            )
            for part in each_node.values[:place]:
                yield Condition(part, isinstance(each_node.op, ast.And))
        elif isinstance(each_node, ast.IfExp):
            for branch in (each_node.body, each_node.orelse):
                if is_part(statement, branch):
                    yield Condition(each_node.test, branch is each_node.body)


class LowerBound(NamedTuple):
    """A number over this one."""

    bound: float


class OneOf(NamedTuple):
    """A value that is one of these."""

    values: tuple[Any, ...]


class Evaluator:
    """The values of expressions of a function.

    known_values: values of attributes, parameters and module variables by name.
    own_values: values of attributes that the class itself assigns.
    functions: those that alone have their name.
    """

    def __init__(
        self,
        node: FunctionNode,
        known_values: Mapping[str, Any],
        own_values: Mapping[str, Any] | None = None,
        functions: Mapping[str, FunctionNode] | None = None,
    ) -> None:
        self._node = node
        self._known_values = known_values
        self._own_values = own_values or {}
        self._functions = functions or {}
        self._local: dict[str, list[tuple[ast.AST, ast.expr | None]]] = {}
        for each_node in ast.walk(node):
            for name, value in _assignments(each_node):
                self._local.setdefault(name, []).append((each_node, value))
        self._open: set[str] = set()
        self.assumed: Mapping[str, Any] = {}
        """Values of variables by their text, for a while."""

    def never(self, conditions: list[Condition]) -> bool:
        """Whether a condition is certainly not met."""
        return any(
            condition.holds not in truths(self.value(condition.test)) for condition in conditions
        )

    def value(self, node: ast.expr | None) -> Any:
        """The value; UNKNOWN where a part of it that counts is unknown."""
        try:
            return UNKNOWN if node is None else self._value(node)
        except (TypeError, ValueError, AttributeError):
            return UNKNOWN

    def return_value(self) -> Any:
        """The value that the function returns."""
        values = [
            self.value(node.value) if node.value else None
            for node in ast.walk(self._node)
            if isinstance(node, ast.Return) and not self.never(conditions(self._node, node))
        ]
        return _any_of(values) if values else None

    def _value(self, node: ast.expr) -> Any:
        if self.assumed and isinstance(node, ast.Name | ast.Attribute):
            value = self.assumed.get(ast.unparse(node), UNKNOWN)
            if value is not UNKNOWN:
                return value
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._variable(node.id)
            case ast.Attribute():
                return self._attribute(node)
            case ast.UnaryOp(op=ast.Not()):
                return _any_of([not truth for truth in truths(self.value(node.operand))])
            case ast.UnaryOp(op=ast.USub()):
                return _map_union(operator.neg, self.value(node.operand))
            case ast.BoolOp():
                return self._join(node)
            case ast.Compare():
                return self._compare(node)
            case ast.Tuple() | ast.List() | ast.Set():
                parts = [self.value(elt) for elt in node.elts]
                is_known = not any(part is UNKNOWN or isinstance(part, OneOf) for part in parts)
                return tuple(parts) if is_known else UNKNOWN
            case ast.IfExp():
                branches = {True: node.body, False: node.orelse}
                return _any_of(
                    [self.value(branches[truth]) for truth in truths(self.value(node.test))]
                )
            case ast.NamedExpr():
                return self.value(node.value)
            case ast.Call():
                return self._call(node)
        return UNKNOWN

    def _variable(self, name: str) -> Any:
        if name not in self._local:
            return self._known_values.get(name, UNKNOWN)
        parameters = {node.arg for node in ast.walk(self._node.args) if isinstance(node, ast.arg)}
        if name in self._open:
            return self._known_values.get(name, UNKNOWN) if name in parameters else UNKNOWN
        self._open.add(name)
        try:
            values = [
                self.value(value)
                for place, value in self._local[name]
                if not self.never(conditions(self._node, place))
            ]
        finally:
            self._open.discard(name)
        if name in parameters:
            values.append(self._known_values.get(name, UNKNOWN))
        return _any_of(values)

    def _attribute(self, node: ast.Attribute) -> Any:
        if (
            isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and node.attr in self._own_values
        ):
            return self._own_values[node.attr]
        return self._known_values.get(node.attr, UNKNOWN)

    def _join(self, node: ast.BoolOp) -> Any:
        ends = isinstance(node.op, ast.Or)
        parts = [self.value(value) for value in node.values]
        if any(truths(part) == {ends} for part in parts):
            return ends
        values = [part for part in parts if truths(part) != {not ends}]
        return (not ends) if not values else UNKNOWN

    def _compare(self, node: ast.Compare) -> Any:
        values = [self.value(operand) for operand in (node.left, *node.comparators)]
        if any(value is UNKNOWN for value in values):
            return UNKNOWN
        choices = [value.values if isinstance(value, OneOf) else (value,) for value in values]
        return _any_of([_all_hold(node.ops, row) for row in product(*choices)])

    def _call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        arguments = node.args
        function_name = node.func.attr if isinstance(node.func, ast.Attribute) else name
        if not arguments and isinstance(
            result := self._known_values.get(f"{function_name}()"), bool
        ):
            return result
        if name == "getattr" and len(arguments) > 1 and isinstance(arguments[1], ast.Constant):
            return self._known_values.get(str(arguments[1].value), UNKNOWN)
        if name == "isinstance" and len(arguments) == 2:
            kind = _KINDS.get(ast.unparse(arguments[1]))
            if kind is None:
                return False if self.value(arguments[0]) is None else UNKNOWN
            return _map_union(lambda value: isinstance(value, kind), self.value(arguments[0]))
        if name == "get_args" and len(arguments) == 1:  # of a Literal
            return self.value(arguments[0])
        if name in ("bool", "len") and len(arguments) == 1:
            return _map_union({"bool": bool, "len": len}[name], self.value(arguments[0]))
        if isinstance(node.func, ast.Attribute) and not arguments:
            owner = self.value(node.func.value)
            if node.func.attr == "get":  # of an environment variable
                return owner
            if node.func.attr == "is_set" and owner is not UNKNOWN:
                return False
            if node.func.attr in ("lower", "upper", "strip"):
                return _map_union(operator.methodcaller(node.func.attr), owner)
        if name in self._functions and f"{name}()" not in self._open:
            inner = Evaluator(self._functions[name], self._known_values)
            inner._open = {*self._open, f"{name}()"}
            return inner.return_value()
        return UNKNOWN


def _all_hold(ops: list[ast.cmpop], row: tuple[Any, ...]) -> Any:
    """Whether a chain of comparisons holds; UNKNOWN where a bound alone is known."""
    results = [
        _bound_comparison(op, side, right)
        if isinstance(side, LowerBound)
        else _COMPARED[type(op)](side, right)
        for side, op, right in zip(row[:-1], ops, row[1:], strict=True)
        if not isinstance(right, LowerBound)
    ]
    if any(result is False for result in results):
        return False
    is_known = len(results) == len(ops) and not any(result is UNKNOWN for result in results)
    return True if is_known else UNKNOWN


def _bound_comparison(op: ast.cmpop, number: LowerBound, right: Any) -> Any:
    """A comparison of a number that is over a bound."""
    if right is None or not isinstance(right, int | float):
        return isinstance(op, ast.IsNot | ast.NotEq)
    if right > number.bound:
        return UNKNOWN
    return isinstance(op, ast.Gt | ast.GtE | ast.NotEq)


def join_values(first: Any, second: Any) -> Any:
    """A value that is one or the other."""
    return _any_of([first, second])


def _any_of(values: list[Any]) -> Any:
    results: list[Any] = []
    for value in values:
        if value is UNKNOWN:
            return UNKNOWN
        for part in value.values if isinstance(value, OneOf) else (value,):
            if not any(
                part is result or (part == result and type(part) is type(result))
                for result in results
            ):
                results.append(part)
    if not results:
        return UNKNOWN
    return results[0] if len(results) == 1 else OneOf(tuple(results))


def _map_union(change: Callable[[Any], Any], value: Any) -> Any:
    if value is UNKNOWN:
        return UNKNOWN
    values = []
    for part in value.values if isinstance(value, OneOf) else (value,):
        with suppress(AttributeError, TypeError):  # a value that the engine's code crashes at
            values.append(change(part))
    return _any_of(values)


def truths(value: Any) -> set[bool]:
    """The possible truths of the value as a condition."""
    if value is UNKNOWN:
        return {True, False}
    return {bool(part) for part in (value.values if isinstance(value, OneOf) else (value,))}


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """The variables that this node assigns; None: a value that is not told."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                if node.value is not None:
                    yield target.id, node.value
            else:
                yield from ((name, None) for name in _names(target))
    elif isinstance(node, ast.AugAssign | ast.For | ast.comprehension):
        yield from ((name, None) for name in _names(node.target))
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from ((name, None) for name in _names(node.optional_vars))


def _names(node: ast.expr) -> set[str]:
    return {
        each_node.id
        for each_node in ast.walk(node)
        if isinstance(each_node, ast.Name) and isinstance(each_node.ctx, ast.Store)
    }
