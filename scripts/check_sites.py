"""The places of a source file that raise an error, with message and conditions.

A condition is kept where it reads a setting: a flag, a variable of the environment, a field of
config.json, or a trait of the GPU. Local names stand for the settings that were assigned to them.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gateway.diagnosis.checks.check_site import HOLE, CheckCondition, CheckSite

_MAX_TEMPLATE_CHARACTERS = 200
_MAX_CONDITIONS = 5
_MAX_ALIASES = 2
_VARIABLE = re.compile(r"(?:VLLM|SGLANG|SGL|NCCL|CUDA|HF|TORCH|FLASHINFER|TRITON)_[A-Z0-9_]+\Z")
_OWNERS = re.compile(r"(?:\w*_)?(?:config|args|cfg)\Z|get_global_server_args\Z|get_server_args\Z")
_MODEL_OWNERS = re.compile(r"(?:\w*_)?(?:hf|text|vision|audio)_(?:\w*_)?config\Z")
_PRINTF = re.compile(r"%[-+ #0-9.]*[sdrifgxX]")
_FIELD = re.compile(r"\{[^{}]*\}")
_SPACE = re.compile(r"\s+")
_CAPABILITY = re.compile(
    r"(?:has|is)_device_capability\Z|is_device_capability_family\Z|is_sm(?P<sm>\d+)"
    r"(?:_\w+)?\Z|get_device_sm\Z|get_device_capability\Z|is_(?P<name>hopper|blackwell)\w*\Z"
)
_PLATFORM = re.compile(
    r"is_(?P<name>cuda|rocm|xpu|cpu|npu|hip|tpu|musa|mps)(?:_alike|_static|_runtime)?\Z|_is_(?P<old>cuda|hip|npu|cpu|xpu)\Z"
)
_PLATFORMS = {"hip": "rocm"}
_CAPABILITIES = {"hopper": "90", "blackwell": "100"}
# Functions that return a size of the layout.
_SIZES = {
    "get_tensor_model_parallel_world_size": ("tensor-parallel-size", "tp-size"),
    "get_attention_tp_size": ("tp-size",),
    "get_moe_tensor_parallel_world_size": ("tp-size",),
    "get_moe_expert_parallel_world_size": ("ep-size",),
    "get_pipeline_model_parallel_world_size": ("pipeline-parallel-size", "pp-size"),
    "get_pp_group": ("pipeline-parallel-size", "pp-size"),
    "get_tp_group": ("tensor-parallel-size", "tp-size"),
    "get_ep_group": ("enable-expert-parallel", "ep-size"),
    "get_dp_group": ("data-parallel-size", "dp-size"),
}
_RELATIONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "~", ast.NotIn: "!~", ast.Is: "==", ast.IsNot: "!=",
}  # fmt: skip
_NEGATIONS = {
    "==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">", "~": "!~", "!~": "~",
    "=": "!", "!": "=", "?": "?", "%": "?",
}  # fmt: skip
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_ENDS = frozenset({"exit", "_exit", "abort", "kill_process_tree"})
_REPORTS = frozenset({"error", "critical", "exception"})


class SettingNames(NamedTuple):
    """The names by which an engine's code reads its settings.

    flags: those of any version, without dashes.
    fields: the flag of a field of a configuration, by class in small letters and field.
    """

    flags: frozenset[str]
    fields: Mapping[tuple[str, str], str] = {}

    def flag(self, name: str) -> str:
        """The flag with the name of a field; empty without one."""
        dashed = name.replace("_", "-").strip("-")
        return dashed if dashed in self.flags else ""


def configuration_fields(text: str, flags: frozenset[str]) -> dict[tuple[str, str], str]:
    """The flag of each field that the constructor of a configuration is given: `cache_config` and
    `cache_dtype` have `kv-cache-dtype`."""
    fields: dict[tuple[str, str], str] = {}
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if not node.func.id.endswith("Config"):
            continue
        owner = _snake_case(node.func.id)
        for keyword in node.keywords:
            names = [
                part.attr.replace("_", "-")
                for part in ast.walk(keyword.value)
                if isinstance(part, ast.Attribute)
            ]
            flag = next((name for name in names if name in flags), "")
            if keyword.arg and flag and flag != keyword.arg.replace("_", "-"):
                fields[owner, keyword.arg] = flag
    return fields


def check_sites(path: str, text: str, names: SettingNames) -> list[CheckSite]:
    """The places of a file, without those of which neither message nor condition says anything."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
    except SyntaxError:
        return []
    sites = _Reader(path, names).read(module)
    return [site for site in dict.fromkeys(sites) if site.parts or site.conditions]


class _Reader:
    """Reads the functions of a file."""

    def __init__(self, path: str, names: SettingNames) -> None:
        self._path, self._names = path, names
        self._is_model = "/models/" in path
        self._members: dict[str, frozenset[str]] = {}
        # Groups of ranks, whose size is a setting.
        self._groups: dict[str, frozenset[str]] = {}
        self._locals: dict[str, frozenset[str]] = {}
        self._texts: dict[str, ast.expr] = {}
        self._class = ""

    def read(self, module: ast.Module) -> Iterator[CheckSite]:
        yield from self._read_scope(module.body, "<module>")

    def _read_scope(self, body: list[ast.stmt], name: str) -> Iterator[CheckSite]:
        yield from self._read_body(body, name, ())

    def _read_class(self, node: ast.ClassDef) -> Iterator[CheckSite]:
        outer_names = self._class, self._members, self._groups
        self._class, self._members, self._groups = node.name, {}, {}
        flags_of_members: dict[str, set[str]] = defaultdict(set)
        for part in ast.walk(node):
            if isinstance(part, ast.Assign) and len(part.targets) == 1:
                target = part.targets[0]
                if isinstance(target, ast.Attribute) and _name(target.value) == "self":
                    alias = self._alias(part.value)
                    self._groups[target.attr] = alias
                    flags_of_members[target.attr] |= alias
        self._members = {key: frozenset(flags) for key, flags in flags_of_members.items() if flags}
        yield from self._read_scope(node.body, "<module>")
        self._class, self._members, self._groups = outer_names

    def _read_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[CheckSite]:
        outer_names, self._locals = (self._locals, self._texts), dict(self._locals)
        self._texts = {}
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        for argument in arguments:
            flag = self._names.flag(argument.arg) if "_" in argument.arg else ""
            self._locals[argument.arg] = frozenset({flag} if flag else ())
        yield from self._read_scope(node.body, node.name)
        self._locals, self._texts = outer_names

    def _read_body(
        self, body: Iterable[ast.stmt], name: str, guards: tuple[tuple[ast.expr, bool], ...]
    ) -> Iterator[CheckSite]:
        statements = list(body)
        for index, node in enumerate(statements):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from self._read_function(node)
            elif isinstance(node, ast.ClassDef):
                yield from self._read_class(node)
            elif isinstance(node, ast.Assert):
                yield self._site(name, "AssertionError", node.msg, (*guards, (node.test, False)))
            elif isinstance(node, ast.Raise):
                yield from self._read_raise(node, name, guards)
            elif isinstance(node, ast.If):
                yield from self._read_body(node.body, name, (*guards, (node.test, True)))
                # A check that passed asks for nothing; a branch that was not taken does.
                later_guards = guards if _raises(node.body) else (*guards, (node.test, False))
                yield from self._read_body(node.orelse, name, later_guards)
                if _leaves(node.body) and not node.orelse:
                    guards = later_guards
            else:
                following = statements[index + 1] if index + 1 < len(statements) else None
                yield from self._read_other(node, following, name, guards)

    def _read_other(
        self,
        node: ast.stmt,
        following: ast.stmt | None,
        name: str,
        guards: tuple[tuple[ast.expr, bool], ...],
    ) -> Iterator[CheckSite]:
        """The places in another statement, which may assign a setting to a name."""
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    self._locals[target.id] = self._alias(node.value)
                    self._texts[target.id] = node.value
        if isinstance(node, ast.Expr) and following is not None and _ends_process(following):
            call = node.value
            if isinstance(call, ast.Call) and _last_name(call.func) in _REPORTS and call.args:
                yield self._site(name, "", call.args[0], guards)
        for block in ("body", "orelse", "finalbody"):
            yield from self._read_body(getattr(node, block, ()), name, guards)
        for handler in getattr(node, "handlers", ()):
            yield from self._read_body(handler.body, name, guards)
        for case in getattr(node, "cases", ()):
            yield from self._read_body(case.body, name, guards)

    def _read_raise(
        self, node: ast.Raise, name: str, guards: tuple[tuple[ast.expr, bool], ...]
    ) -> Iterator[CheckSite]:
        error = node.exc
        if isinstance(error, ast.Call):
            message = error.args[0] if error.args else None
            message = next(
                (word.value for word in error.keywords if word.arg in ("detail", "message")),
                message,
            )
            yield self._site(name, _last_name(error.func), message, guards)
        elif error is not None and (exception := _last_name(error)) and exception[:1].isupper():
            yield self._site(name, exception, None, guards)

    def _site(
        self,
        name: str,
        exception: str,
        message: ast.expr | None,
        guards: tuple[tuple[ast.expr, bool], ...],
    ) -> CheckSite:
        template = _SPACE.sub(" ", self._template(message)).strip()
        conditions = [
            condition
            for test, is_true in guards
            for condition in self._conditions(test, is_true=is_true)
        ]
        last_conditions = tuple(dict.fromkeys(conditions))[-_MAX_CONDITIONS:]
        return CheckSite(
            self._path, name, exception, template[:_MAX_TEMPLATE_CHARACTERS], last_conditions
        )

    # Messages

    def _template(self, node: ast.expr | None, depth: int = 0) -> str:
        """The constant parts of a message, with a hole for each value."""
        if node is None:
            return ""
        if depth > 8:
            return HOLE
        if isinstance(node, ast.Constant):
            text = node.value if isinstance(node.value, str) else HOLE
            return _PRINTF.sub(HOLE, text) if depth == 0 and "%" in text else text
        if isinstance(node, ast.JoinedStr):
            return "".join(
                part.value
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
                else HOLE
                for part in node.values
            )
        if isinstance(node, ast.BinOp):
            text = self._template(node.left, depth + 1)
            if isinstance(node.op, ast.Mod):
                return _PRINTF.sub(HOLE, text)
            return text + self._template(node.right, depth + 1)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "format":
                return _FIELD.sub(HOLE, self._template(node.func.value, depth + 1))
            if node.func.attr in ("strip", "rstrip", "lstrip"):
                return self._template(node.func.value, depth + 1)
        if isinstance(node, ast.Name) and node.id in self._texts and depth < 2:
            return self._template(self._texts[node.id], depth + 1)
        return HOLE

    # Conditions

    def _conditions(self, test: ast.expr, *, is_true: bool) -> Iterator[CheckCondition]:
        """The comparisons of settings in a test, in the form that holds at the place."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield from self._conditions(test.operand, is_true=not is_true)
        elif isinstance(test, ast.BoolOp):
            # Any of several alternatives may hold, so every part is named.
            for part in test.values:
                yield from self._conditions(part, is_true=is_true)
        elif isinstance(test, ast.Compare) and len(test.ops) == 1:
            yield from self._comparison(test, is_true=is_true)
        else:
            relation = "=" if is_true else "!"
            is_plain = isinstance(test, ast.Name | ast.Attribute)
            for setting in self._settings(test):
                if setting.startswith("gpu.capability>="):
                    bound = CheckCondition("gpu.capability", ">=", setting.partition(">=")[2])
                    yield bound if is_true else bound._replace(relation="<")
                elif is_plain or setting.startswith("gpu."):
                    yield CheckCondition(setting, relation)
                else:
                    yield CheckCondition(setting, "?")

    def _comparison(self, test: ast.Compare, *, is_true: bool) -> Iterator[CheckCondition]:
        first_operand, second_operand = test.left, test.comparators[0]
        relation = _RELATIONS[type(test.ops[0])]
        if isinstance(first_operand, ast.Constant) and relation in ("==", "!=", *_MIRRORED):
            first_operand, second_operand = second_operand, first_operand
            relation = _MIRRORED.get(relation, relation)
        if not is_true:
            relation = _NEGATIONS[relation]
        if isinstance(first_operand, ast.BinOp) and isinstance(first_operand.op, ast.Mod):
            yield from self._remainder(first_operand, second_operand, relation)
            return
        first_settings = self._settings(first_operand)
        second_settings = self._settings(second_operand)
        value = _constant(second_operand)
        for name in first_settings:
            setting = name.partition(">=")[0]
            if value is not None:
                yield _condition(setting, relation, value)
            elif second_settings and relation not in ("~", "!~"):
                yield CheckCondition(setting, relation, second_settings[0].partition(">=")[0])
            else:
                yield CheckCondition(setting, "?")
        for name in second_settings if not first_settings else ():
            choice = _constant(first_operand)
            is_choice = choice is not None and relation in ("==", "!=", *_MIRRORED)
            mirrored = _MIRRORED.get(relation, relation)
            if is_choice:
                yield _condition(name, mirrored, choice or "")
            else:
                yield CheckCondition(name, "?")

    def _remainder(
        self, division: ast.BinOp, result: ast.expr, relation: str
    ) -> Iterator[CheckCondition]:
        """The conditions of a remainder, of which either number may be a setting."""
        is_multiple = relation == "==" and _constant(result) == "0"
        dividend, divisor = self._settings(division.left), self._settings(division.right)
        value = _constant(division.right) or (divisor[0] if divisor else "")
        for name in dividend:
            yield CheckCondition(name, "?" if is_multiple or not value else "%", value)
        for name in divisor:
            yield CheckCondition(name, "?", dividend[0] if dividend else "")

    # Settings

    def _settings(self, node: ast.expr) -> list[str]:
        """The settings that an expression reads, in order."""
        settings: dict[str, None] = {}
        for part in _outer_parts(node):
            for name in self._setting(part):
                settings.setdefault(name)
        return list(settings)

    def _alias(self, node: ast.expr) -> frozenset[str]:
        """The settings for which a name stands that has this value.

        A value of many settings stands for none, and only a test of the GPU alone for its trait.
        """
        settings = self._settings(node)
        if not isinstance(node, ast.Call | ast.BoolOp | ast.Compare | ast.UnaryOp):
            settings = [name for name in settings if not name.startswith("gpu.")]
        return frozenset(settings if len(settings) <= _MAX_ALIASES else ())

    def _setting(self, node: ast.expr) -> tuple[str, ...]:
        """The settings of one name, chain of attributes or call."""
        chain = _chain(node)
        if not chain:
            return ()
        name, owner = chain[-1], chain[-2] if len(chain) > 1 else ""
        if variable := next((word for word in chain if _VARIABLE.match(word)), ""):
            return (variable,)
        if (trait := _trait(name, node)) or (trait := _trait(owner, node)):
            return (trait,)
        for word in reversed(chain):
            if flags := _SIZES.get(word):
                return tuple(flag for flag in flags if flag in self._names.flags)[:1]
        if len(chain) == 1:
            if name in self._locals:
                return tuple(sorted(self._locals[name]))
            return ()
        return self._field(chain, owner, name)

    def _field(self, chain: list[str], owner: str, name: str) -> tuple[str, ...]:
        """The setting that a field of an object has."""
        is_own = owner in ("self", "cls")
        if is_own and "_" in name and (flag := self._names.flag(name)):
            return (flag,)
        if is_own and name in self._members:
            return tuple(sorted(self._members[name]))
        if chain[0] == "self" and name == "world_size" and owner in self._groups:
            return tuple(sorted(self._groups[owner]))
        place = _snake_case(self._class) if is_own else owner.lstrip("_")
        if (place, name) in self._names.fields:
            return (self._names.fields[place, name],)
        if _MODEL_OWNERS.match(place) or (self._is_model and place in ("config", "hf_config")):
            return (f"model.{name}",)
        if not _OWNERS.search(place):
            return ()
        if flag := self._names.flag(name):
            return (flag,)
        if flag := self._names.flag(place):
            return (f"{flag}.{name}",)
        if place == "lora_config" and "enable-lora" in self._names.flags:
            return ("enable-lora",)
        return ()


def _condition(name: str, relation: str, value: str) -> CheckCondition:
    if value in ("None", "False", "True") and relation in ("==", "!="):
        is_set = (relation == "==") is (value == "True")
        return CheckCondition(name, "=" if is_set else "!")
    return CheckCondition(name, relation, value)


def _constant(node: ast.expr) -> str | None:
    """The text of a constant, or of several with commas between."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _constant(node.operand)
        return None if value is None else f"-{value}"
    if isinstance(node, ast.Tuple | ast.List | ast.Set) and node.elts:
        values = [_constant(element) for element in node.elts]
        return ",".join(map(str, values)) if None not in values else None
    if isinstance(node, ast.Attribute) and node.attr.isupper():
        return node.attr
    return None


def _outer_parts(node: ast.expr) -> Iterator[ast.expr]:
    """The names, chains of attributes and calls of an expression, without their inner parts."""
    if isinstance(node, ast.Attribute | ast.Name):
        yield node
        return
    if isinstance(node, ast.Call):
        yield node
        for argument in (*node.args, *(word.value for word in node.keywords)):
            yield from _outer_parts(argument)
        if isinstance(node.func, ast.Attribute):
            yield node.func.value
        return
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr):
            yield from _outer_parts(part)


def _chain(node: ast.expr) -> list[str]:
    """The names of a chain, the outermost first; a call has the name of its function."""
    words: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            words.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Call):
            if _name(node.func) == "getattr" and len(node.args) > 1:
                words.append(str(getattr(node.args[1], "value", "")))
                node = node.args[0]
            elif _last_name(node.func) in ("getenv", "get") and node.args:
                key = getattr(node.args[0], "value", None)
                if isinstance(key, str) and _VARIABLE.match(key):
                    return [key]
                node = node.func
            else:
                node = node.func
        elif isinstance(node, ast.Name):
            words.append(node.id)
            return words[::-1]
        else:
            return words[::-1]


def _trait(name: str, node: ast.expr) -> str:
    """The trait of the GPU that a function of this name asks for; empty for another one."""
    if match := _CAPABILITY.match(name):
        number = match["sm"] or _CAPABILITIES.get(match["name"] or "", "")
        if not number and isinstance(node, ast.Call) and node.args:
            value = _constant(node.args[0]) or ""
            number = "".join(value.split(",")) if value.replace(",", "").isdigit() else ""
        return f"gpu.capability>={number}" if number else "gpu.capability"
    if match := _PLATFORM.match(name):
        platform = match["name"] or match["old"]
        return f"gpu.{_PLATFORMS.get(platform, platform)}"
    return ""


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else _name(node)


def _raises(body: list[ast.stmt]) -> bool:
    """Whether a block is a check."""
    return isinstance(body[-1], ast.Raise)


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether code after a block is not reached through it."""
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _snake_case(name: str) -> str:
    """The name of a variable for an object of a class."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.replace("LoRA", "Lora")).lower()


def _ends_process(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and _last_name(call.func) in _ENDS
