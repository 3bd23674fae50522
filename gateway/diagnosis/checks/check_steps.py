"""The changes that let a check of an engine's source pass, from its conditions. Pure.

Any condition that no longer holds lets the check pass. A setting that the start gave comes first,
then the innermost condition. Settings that the planner owns come last.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from gateway.diagnosis.checks.check_site import CheckCondition

if TYPE_CHECKING:
    from gateway.diagnosis.checks.check_index import CheckMatch
    from gateway.diagnosis.clues.features import VersionSettings
    from gateway.diagnosis.options import StartOptions
    from gateway.diagnosis.structure import ExceptionShape

_MAX_CHANGES = 2
_MAX_VALUES = 4
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\Z")
_LIMITS = {">": "at most", ">=": "less than", "<": "at least", "<=": "more than"}
_FIELD = re.compile(r"\b(?:self|\w*args|\w*config)\.([a-z]\w*_\w+)")
_MODEL_FIELD = re.compile(r"model\.(?P<field>[a-z]\w*_\w+)\Z")
# Settings of the layout, which change the use of the machine.
_LAYOUT = re.compile(r"(?:tensor|pipeline|data)-parallel-size\Z|(?:tp|pp|dp)-size\Z")
_PLAIN_VALUE = re.compile(r"[\w.+-]{1,40}\Z")
# Settings of places and of the model, whose change is another start.
_PLACE_SETTINGS = frozenset(
    {"model", "model-path", "host", "port", "device", "tokenizer", "served-model-name", "config"}
)


class _SettingChange(NamedTuple):
    """A change of a setting, with its rank among several: the lowest first."""

    rank: tuple[int, int]
    text: str


def check_steps(
    check: CheckMatch, settings: VersionSettings | None, options: StartOptions
) -> tuple[str, ...]:
    """The steps for a check, at most two."""
    site = check.site
    changes = [
        _SettingChange((_rank(condition, settings, options), depth), text)
        for depth, condition in enumerate(reversed(site.conditions))
        if condition.name != condition.value
        and (condition.relation != "!" or _is_named(condition.name, site.template))
        and (text := _change(condition, settings, options))
    ]
    reason = f"the engine's check in {site.path}:{site.name} reads it"
    texts = dict.fromkeys(change.text for change in sorted(changes))
    return tuple(f"{text}: {reason}." for text in list(texts)[:_MAX_CHANGES])


def source_steps(
    shape: ExceptionShape, settings: VersionSettings | None, options: StartOptions
) -> tuple[str, ...]:
    """The steps for a comparison with a setting that has no value, which the failing line reads."""
    if settings is None or shape.exception != "TypeError" or "NoneType" not in shape.message:
        return ()
    names = (name.replace("_", "-") for name in _FIELD.findall(shape.source))
    flags = [name for name in dict.fromkeys(names) if name in settings.flags]
    unset_flags = [flag for flag in flags if options.is_set(flag) is not True]
    return tuple(
        f"Set --{flag}: the failing line needs its value." for flag in unset_flags[:_MAX_CHANGES]
    )


def _rank(
    condition: CheckCondition, settings: VersionSettings | None, options: StartOptions
) -> int:
    root = condition.name.partition(".")[0]
    spec = settings.flags.get(root, {}) if settings else {}
    if root == "model":
        return 3
    if _VARIABLE.match(root):
        return 0 if options.sets(root) else 3
    order = 0 if options.is_set(root) is True else 2
    is_late = bool(spec.get("ours")) or bool(_LAYOUT.match(root))
    return order + (condition.relation == "?") + 4 * is_late


def _change(
    condition: CheckCondition, settings: VersionSettings | None, options: StartOptions
) -> str:
    """The change after which a condition does not hold; empty where nothing can be said."""
    name, relation, value = condition
    if name == "gpu.capability":
        return _gpu_change(relation, value)
    if match := _MODEL_FIELD.match(name):
        return f"Check {match['field']} in the model's config.json"
    if name.startswith(("gpu.", "model.")):
        return ""
    if _VARIABLE.match(name):
        return _variable_change(condition)
    root, _, key = name.partition(".")
    if root in _PLACE_SETTINGS or (settings is not None and root not in settings.flags):
        return ""
    setting = f"{key.replace('.', ' ')} of --{root}" if key else f"--{root}"
    bound = f"--{value}" if settings is not None and value in settings.flags else value
    if relation in _LIMITS and value:
        verb = "Lower" if relation.startswith(">") else "Raise"
        if bound == "0" and relation == ">":
            return f"Omit {setting}"
        return f"{verb} {setting} to {_LIMITS[relation]} {bound}"
    return _choice_change(CheckCondition(setting, relation, bound), root, settings, options)


def _choice_change(
    condition: CheckCondition, root: str, settings: VersionSettings | None, options: StartOptions
) -> str:
    """The change of a setting after which a check no longer holds; "": unknown."""
    setting, relation, value = condition
    spec = settings.flags.get(root, {}) if settings else {}
    values = ", ".join(value.split(",")[:_MAX_VALUES])
    if relation in ("=", "!") and spec.get("type") in ("int", "float"):
        # A number is never off: other numbers are.
        return ""
    if relation == "=":
        if options.is_set(root) is False and setting == f"--{root}":
            # A default that is on has a negation; one that is off did not hold.
            has_negation = spec.get("type") == "bool" and spec.get("default") is not False
            return f"Add --no-{root}" if has_negation and not spec.get("choices") else ""
        return f"Omit {setting}"
    if relation == "!":
        return "" if options.is_on(root) and setting == f"--{root}" else f"Set {setting}"
    if relation == "%" and value:
        return f"Set {setting} to a multiple of {value}"
    if relation in ("==", "~") and value:
        return f"Give {setting} another value than {values}"
    if relation in ("!=", "!~") and _is_plain_value(value):
        return f"Set {setting} to {'one of ' if ',' in value else ''}{values}"
    return f"Change {setting}" if options.is_set(root) is not False else ""


def _variable_change(condition: CheckCondition) -> str:
    name, relation, value = condition
    if relation == "=":
        return f"Unset {name}, or set it to 0"
    if relation == "!":
        return f"Set {name}=1"
    if relation in ("!=", "!~") and _is_plain_value(value):
        return f"Set {name} to {', '.join(value.split(',')[:_MAX_VALUES])}"
    return f"Change or unset {name}"


def _is_named(name: str, text: str) -> bool:
    """Whether a message has the name of a setting, in any form of its dashes."""
    return re.search(name.replace("-", "[-_ ]"), text, re.IGNORECASE) is not None


def _gpu_change(relation: str, value: str) -> str:
    if relation != "<" or not value.isdigit() or len(value) < 2:
        return ""
    return f"Use a GPU of compute capability {value[:-1]}.{value[-1]} or newer"


def _is_plain_value(value: str) -> bool:
    return bool(value) and all(map(_PLAIN_VALUE.match, value.split(",")))
