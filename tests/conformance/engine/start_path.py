"""The refusals in an engine's start path: each `raise` of a function that a start enters or calls.

A refusal counts as one of a configuration unless its own code says that no configuration of this
machine leads to it (`Refusal.kind`). The standard library alone reads the sources.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.conformance.engine.declared_values import constants, typed_fields
from tests.conformance.engine.joint_conditions import are_contrary
from tests.conformance.engine.path_conditions import UNKNOWN, Evaluator, conditions, join_values
from tests.conformance.engine.reviewed_refusals import ReviewedRefusal

# Conditions on the platform: the start is on NVIDIA GPUs.
_PLATFORM = re.compile(
    r"is_(rocm|cpu|xpu|tpu|hip|npu|musa|hpu|mps|mlx|out_of_tree|unspecified|cuda_alike|cuda)\b"
    r"|rocm|xpu|npu|musa|mps|aiter|on_gfx|is_sm\d|sys\.platform|get_device_capability|is_blackwell"
    r"|device_type|device_name|current_platform|cuda_available|\.device\b",
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
# Conditions on files beside config.json, which no rehearsal of a config has.
_FILE = re.compile(r"exists\(|is_?file\(|is_?dir\(|glob|listdir|gguf|_files\b", re.IGNORECASE)
# Errors of the engine's own steps, by their words: a step came twice, or before another one.
_ORDER = re.compile(
    r"has not been|have not been|is not set;|[Nn]o \w+ \w+ is set"
    r"|must be (set|resolved) (after|before)|already been|Duplicate layer|collision"
    r"|must be present for|not published|must implement"
)
# These hold or name settings and are none themselves.
_GENERAL = re.compile(r"config|\w+_config|name|type|key|length|port|model|static_forward_context")
# Conditions on the files of a draft model.
_DRAFT = re.compile(r"\bdraft_(model|hf|vllm)?_?config|draft_architectures|draft_model_path")
_PROTOCOLS = ("__getattr__", "__getattribute__", "__getitem__", "__init_subclass__", "__new__")


KINDS = {
    "config": "a configuration may lead to it",
    "platform": "its conditions are on other devices than the rehearsed GPU",
    "package": "its conditions are on packages beside the engine",
    "protocol": "it is of Python's own protocols",
    "abstract": "a method that classes replace",
    "elsewhere": "it tells of another error of a file, a package or a network",
    "wrapped": "another raise makes its own error of it",
    "handled": "the engine catches it",
    "option": "its conditions are never met while each option that no plan gives has its default",
    "typed": "its conditions are of values that the types of the options refuse before",
    "contrary": "no values of its variables meet its conditions together",
    "draft": "its conditions are on the files of a draft model, which an inquiry does not get",
    "file": "its conditions are on other files than config.json",
    "order": "it tells of the engine's own steps in a wrong order",
    "internal": "no input of its conditions is a setting",
    # The verdict of a reading of the code (reviewed_refusals.txt).
    "chosen": "reviewed: the engine's parser offers no value that leads to it",
    "first": "reviewed: another refusal comes before it for each value that would lead to it",
    "fixed": "reviewed: the engine's own code alone sets the value in its condition",
    "beside": "reviewed: its condition is on a file, a package or code beside the configuration",
    "closed": "reviewed: its condition is an option that no plan gives",
}


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
    """kind: config, or why no configuration leads to it (KINDS)."""

    place: str
    function: str
    kind: str
    text: str


class Sources:
    """The functions of the files that starts enter, with the values of unplanned options.

    settings: names of flags, of fields of config.json and of the engine's configurations.
    defaults: the defaults of options that no plan gives (option_defaults.py). devices: the engine's
    properties of the rehearsed GPU, by attribute, or method with "()".
    """

    def __init__(
        self,
        package: Path,
        files: Collection[str],
        settings: Collection[str],
        defaults: Mapping[str, Any],
        devices: Mapping[str, bool] | None = None,
    ) -> None:
        self.settings = settings
        self._devices = devices or {}
        self.functions = [
            function for file in sorted({*files}) for function in _functions(package, file)
        ]
        self._defaults = defaults
        self._single: dict[str, Any] = {}
        name_counts = Counter(function.node.name for function in self.functions)
        for each_function in self.functions:
            if name_counts[each_function.node.name] == 1 and not each_function.owner:
                self._single[each_function.node.name] = each_function.node
        self._own_values: dict[tuple[str, str], dict[str, Any]] = {}
        for each_function in self.functions:
            if each_function.owner and each_function.node.name == "__init__":
                self._own_values[each_function.file, each_function.owner] = self._init_values(
                    each_function
                )
        self._assignments: dict[str, list[tuple[Function, ast.Attribute, ast.expr | None]]]
        self._assignments = defaultdict(list)
        for each_function in self.functions:
            for target, value in _attribute_assignments(each_function.node):
                self._assignments[target.attr].append((each_function, target, value))
        self._constants = {file: constants(package, file) for file in {*files}}
        self._typed: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
        for file in {*files}:
            module = ast.parse((package / file).read_text())
            for (owner, name), value in typed_fields(module, self._constants[file]).items():
                if (whole := self._joined_value(file, owner, name, value)) is not UNKNOWN:
                    self._typed[file, owner][name] = whole
        self._calls: dict[str, list[tuple[Function, ast.Call]]] = defaultdict(list)
        for each_function in self.functions:
            for node in ast.walk(each_function.node):
                if isinstance(node, ast.Call):
                    self._calls[_name_of(node.func)].append((each_function, node))

    def never(self, function: Function, node: ast.AST) -> bool:
        """Whether no start with planned options reaches this part of the function."""
        own_values = self._own_values.get((function.file, function.owner))
        evaluator = Evaluator(function.node, self._defaults, own_values, self._single)
        return evaluator.never(conditions(function.node, node))

    def is_elsewhere(self, function: Function, node: ast.AST) -> bool:
        """Whether the rehearsed GPU never reaches this part of the function."""
        known_values = {**self._defaults, **self._devices}
        return Evaluator(function.node, known_values).never(conditions(function.node, node))

    def is_refused_before(self, function: Function, node: ast.AST) -> bool:
        """Whether the declared types leave no value that reaches this part of the function."""
        return self._typed_evaluator(function).never(conditions(function.node, node))

    def is_contrary(self, function: Function, node: ast.AST) -> bool:
        """Whether no values of variables meet all conditions of this part together."""
        return are_contrary(self._typed_evaluator(function), function.node, node)

    def _typed_evaluator(self, function: Function) -> Evaluator:
        known_values = {**self._constants[function.file], **self._defaults}
        own_values = {
            **self._own_values.get((function.file, function.owner), {}),
            **self._typed.get((function.file, function.owner), {}),
        }
        return Evaluator(function.node, known_values, own_values, self._single)

    def _joined_value(self, file: str, owner: str, name: str, declared: Any) -> Any:
        """The declared value of a field, and those that the engine assigns it."""
        result = declared
        for function, target, value in self._assignments[name]:
            if _name_of(target.value) != "self" or (function.file, function.owner) == (file, owner):
                result = join_values(result, Evaluator(function.node, self._defaults).value(value))
        return result

    def is_handled(self, function: Function) -> bool:
        """Whether each call of the function stands where its errors are caught and kept."""
        calls = self._calls.get(function.node.name, [])
        return bool(calls) and all(_is_caught(caller.node, call) for caller, call in calls)

    def _init_values(self, function: Function) -> dict[str, Any]:
        """Values of the attributes that `__init__` assigns; UNKNOWN if more than once."""
        evaluator, result = Evaluator(function.node, self._defaults), dict[str, Any]()
        for node in ast.walk(function.node):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                if isinstance(target, ast.Attribute) and _name_of(target.value) == "self":
                    single = target.attr not in result
                    result[target.attr] = evaluator.value(node.value) if single else UNKNOWN
        return result


def refusals(
    sources: Sources,
    entered: Collection[tuple[str, int]],
    reviewed: Collection[ReviewedRefusal] = (),
) -> list[Refusal]:
    """The refusals of functions that starts entered (file, first line), and of the functions that
    these call by names which are certain.

    Raises LookupError for a reviewed one that is none of those which a configuration may lead to.
    """
    entries = [
        each_function
        for each_function in sources.functions
        if (each_function.file, each_function.first) in entered
    ]
    result, reviewed_refusals = list[Refusal](), set[ReviewedRefusal]()
    for callable_function in [*entries, *_callable_functions(sources, entries)]:
        function = f"{callable_function.owner}.{callable_function.node.name}".lstrip(".")
        for statement in callable_function.raises:
            text, kind = ast.unparse(statement), _kind(sources, callable_function, statement)
            rows = [row for row in reviewed if row.names(callable_function.file, function, text)]
            if kind == "config" and rows:
                reviewed_refusals.update(rows)
                kind = rows[0].kind
            result.append(
                Refusal(f"{callable_function.file}:{statement.lineno}", function, kind, text[:200])
            )
    if unused_rows := [
        f"{row.file} {row.function}: {row.words}" for row in {*reviewed} - reviewed_refusals
    ]:
        raise LookupError("no refusal of a configuration: " + "; ".join(sorted(unused_rows)))
    return result


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
                result.append(own_function := Function(file, owner, child, []))
                visit(child, owner, own_function)
            elif isinstance(child, ast.ClassDef):
                visit(child, child.name, None)
            else:
                if isinstance(child, ast.Raise) and function is not None:
                    function.raises.append(child)
                visit(child, owner, function)

    visit(ast.parse((package / file).read_text()), "", None)
    return result


def _attribute_assignments(
    function: ast.AST,
) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Attributes that a function assigns, with their values; None: another one than it has."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = None if isinstance(node, ast.AugAssign) else node.value
            yield from ((target, value) for target in targets if isinstance(target, ast.Attribute))


def _callable_functions(sources: Sources, entered: list[Function]) -> list[Function]:
    """Functions that a start with planned options can call though none of the starts did."""
    by_name: dict[str, list[Function]] = defaultdict(list)
    for function in sources.functions:
        by_name[function.node.name].append(function)
    visited_ids, result, open_ones = {id(function) for function in entered}, [], [*entered]
    while open_ones:
        caller = open_ones.pop()
        for node in ast.walk(caller.node):
            if not isinstance(node, ast.Call):
                continue
            for function in _targets(caller, node.func, by_name):
                if id(function) not in visited_ids and not sources.never(caller, node):
                    visited_ids.add(id(function))
                    result.append(function)
                    open_ones.append(function)
    return result


def _targets(
    caller: Function, called: ast.expr, by_name: dict[str, list[Function]]
) -> list[Function]:
    """A function of the same file or of one that alone has the name; a method of the same class."""
    if isinstance(called, ast.Name):
        namesakes = [function for function in by_name.get(called.id, ()) if not function.owner]
        return [function for function in namesakes if function.file == caller.file] or namesakes[
            : len(namesakes) == 1
        ]
    if not isinstance(called, ast.Attribute):
        return []
    namesakes = by_name.get(called.attr, [])
    if isinstance(called.value, ast.Name) and called.value.id in ("self", "cls"):
        return [
            function
            for function in namesakes
            if (function.file, function.owner) == (caller.file, caller.owner)
        ]
    return namesakes[: len(namesakes) == 1]


def _kind(sources: Sources, function: Function, statement: ast.Raise) -> str:
    exception_text = ast.unparse(statement.exc) if statement.exc else ""
    guards = [*_guards(function.node, statement)]
    path_conditions = conditions(function.node, statement)
    tests = " ; ".join(ast.unparse(guard.test) for guard in guards if isinstance(guard, ast.If))
    handlers = [guard for guard in guards if isinstance(guard, ast.ExceptHandler)]
    if function.node.name in _PROTOCOLS:
        return "protocol"
    if not tests and exception_text.startswith("NotImplementedError") and not handlers:
        return "abstract"
    if _PLATFORM.search(tests) or _PLATFORM.search(function.node.name):
        return "platform"
    if sources.is_elsewhere(function, statement) and not sources.never(function, statement):
        return "platform"
    if _PACKAGE.search(tests) or exception_text.startswith(("ImportError", "ModuleNotFoundError")):
        return "package"
    if any(
        statement.exc is None
        or isinstance(statement.exc, ast.Name)
        or _ELSEWHERE.search(_type(handler))
        for handler in handlers
    ):
        return "elsewhere"
    if _is_caught(function.node, statement, raises=True):
        return "wrapped"
    if _is_caught(function.node, statement) or sources.is_handled(function):
        return "handled"
    if sources.never(function, statement):
        return "option"
    if sources.is_refused_before(function, statement):
        return "typed"
    if sources.is_contrary(function, statement):
        return "contrary"
    if _FILE.search(tests) or _FILE.search(function.node.name):
        return "file"
    if _ORDER.search(exception_text):
        return "order"
    if _DRAFT.search(" ".join(ast.unparse(condition.test) for condition in path_conditions)):
        return "draft"
    inputs = {name for name in _inputs(function, guards) if not _GENERAL.fullmatch(name)}
    return "internal" if inputs.isdisjoint(sources.settings) else "config"


def _is_caught(node: ast.AST, statement: ast.AST, *, raises: bool = False) -> bool:
    """Whether a `try` around the statement catches an error and raises none; raises: another."""
    return any(
        isinstance(guard, ast.Try)
        and any(_is_part(statement, part) for part in guard.body)
        and any(
            re.search(r"^$|ValueError|\bException|AssertionError", _type(handler))
            and any(isinstance(part, ast.Raise) for part in ast.walk(handler)) is raises
            for handler in guard.handlers
        )
        for guard in _guards(node, statement)
    )


def _inputs(function: Function, guards: list[ast.AST]) -> set[str]:
    """The names and words in the conditions, and in the function's values for such names."""
    conditions = [
        getattr(guard, name, None) for guard in guards for name in ("test", "iter", "subject")
    ]
    result = {
        word for condition in conditions if condition is not None for word in _words(condition)
    }
    assignments = [
        node
        for node in ast.walk(function.node)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None
    ]
    for _ in range(2):
        for node in assignments:
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


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else str(getattr(node, "id", ""))


def _is_part(statement: ast.AST, node: ast.AST) -> bool:
    return any(each_node is statement for each_node in ast.walk(node))


def _type(handler: ast.ExceptHandler) -> str:
    return ast.unparse(handler.type) if handler.type else ""


def _guards(node: ast.AST, statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes around the statement, from outside."""
    for child in ast.iter_child_nodes(node):
        if any(each_node is statement for each_node in ast.walk(child)):
            yield child
            yield from _guards(child, statement)
