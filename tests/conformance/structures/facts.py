"""Facts of an architecture beside its rows: shards, quantization, absent fields, other names."""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from gateway.engines.inside.meta import folder_of
from tests.conformance.structures.learn import LAYER_RULE, LearnedRow, flatten, pattern_of
from tests.conformance.structures.observation import observe

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_WORDS = {"and", "or", "not", "in", "if", "else", "i", "all", "always", "once"}
_FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
# Terms that configuration classes compute for absent fields.
_DERIVED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "hidden_size//num_attention_heads": lambda part: (
        part["hidden_size"] // part["num_attention_heads"]
    ),
    "num_attention_heads": lambda part: part["num_attention_heads"],
    "4*hidden_size": lambda part: 4 * part["hidden_size"],
    "2*hidden_size": lambda part: 2 * part["hidden_size"],
    "hidden_size": lambda part: part["hidden_size"],
}


class Facts(NamedTuple):
    """shards: by pattern, at a tensor parallel size of 2. plain: patterns of layers that FP8 leaves
    alone. absent, aliases: as in gateway/models/families/structure.py. packed: names that a
    checkpoint has for a fused layer."""

    shards: dict[str, str]
    plain: set[str]
    absent: dict[str, dict[str, Any]]
    aliases: dict[str, str]
    packed: dict[str, list[str]]


def facts_of(
    base: dict[str, Any],
    built: Mapping[str, Mapping[str, Any]],
    rows: Iterable[LearnedRow],
    **arguments: Any,
) -> Facts:
    """The facts of the architecture of `base`. built: its rows by name on one rank."""
    plain: set[str] = set()
    with suppress(Exception):
        plain = {
            pattern_of(name)[0]
            for name, row in observe(base | _FP8, **arguments).items()
            if "Unquantized" in row.get("method", "")
        }
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    model = registry.ModelRegistry.models[base["architectures"][0]].load_model_cls()
    packed = getattr(model, "packed_modules_mapping", None) or {}
    return Facts(
        _shards(base, built, arguments),
        plain,
        _absent(base, {name for row in rows for name in fields_of(row)}),
        _aliases(base),
        {name: [*parts] for name, parts in packed.items() if [*parts] != [name]},
    )


def fields_of(row: LearnedRow) -> set[str]:
    """The fields that the terms of a row read."""
    terms = [row.when, row.layers, row.of, *row.sizes.values()]
    text = " ".join(re.sub(r"'[^']*'|\[i\]", "", term) for term in terms if term)
    return {*_NAME.findall(text)} - _WORDS


def _shards(
    base: dict[str, Any], built: Mapping[str, Mapping[str, Any]], arguments: Mapping[str, Any]
) -> dict[str, str]:
    found: dict[str, str] = {}
    with suppress(Exception):
        for name, row in observe(base, 2, **arguments).items():
            pattern, _ = pattern_of(name)
            if row["what"] == "linear":
                found[pattern] = row["shard"]
            elif row["what"] == "parameter" and name in built:
                whole = built[name]["shape"]
                cut = whole[:1] != row["shape"][:1]
                found[pattern] = "column" if cut else "replicated"
    return found


def read_config(config: Mapping[str, Any]) -> Any:
    """The configuration object that vLLM makes of a config.json."""
    reader: Any = importlib.import_module("vllm.transformers_utils.config")
    with folder_of({"config.json": json.dumps(config).encode()}) as folder:
        return reader.get_config(folder, trust_remote_code=False)


def _absent(base: Mapping[str, Any], fields: set[str]) -> dict[str, dict[str, Any]]:
    """By field, its value where the config lacks it: constant, periodic, or a term."""
    others = [base]
    for names in (("hidden_size",), ("num_attention_heads",)):
        other = copy.deepcopy(dict(base))
        for part in [other, *(value for value in other.values() if isinstance(value, dict))]:
            for name in names:
                if type(part.get(name)) is int:
                    part[name] *= 2
        others.append(other)
    found = {}
    for field in sorted(fields):
        with suppress(Exception):
            values = [_value(read_config(_without(config, field)), field) for config in others]
            rule = _rule(field, values, others)
            if rule is not None and not ("period" in rule and _follows(base, field, values[0])):
                found[field] = rule
    return found


def _follows(base: Mapping[str, Any], field: str, value: Any) -> bool:
    """Whether the list that a config without the field gets follows from another field."""
    prefix = field.rpartition(".")[0]
    for name, number in _part(base, prefix).items():
        if type(number) is int and LAYER_RULE.search(name):
            changed = copy.deepcopy(dict(base))
            _part(changed, prefix)[name] = number + 1
            if _value(read_config(_without(changed, field)), field) != value:
                return True
    return False


def _rule(field: str, values: list[Any], configs: list[Any]) -> dict[str, Any] | None:
    first = values[0]
    if any(value != first for value in values):
        prefix = field.rpartition(".")[0]
        parts = [_part(config, prefix) for config in configs]
        for term, compute in _DERIVED.items():
            if [compute(part) for part in parts] == values:
                return {"text": _NAME.sub(rf"{prefix}.\g<0>" if prefix else r"\g<0>", term)}
        return None
    if isinstance(first, list) and first:
        for period in range(1, len(first) // 2 + 1):
            if all(item == first[place % period] for place, item in enumerate(first)):
                return {"period": first[:period]}
        return None
    return {"is": first} if isinstance(first, bool | int | str | None | list) else None


def _part(config: Mapping[str, Any], prefix: str) -> Any:
    value: Any = config
    for name in prefix.split(".") if prefix else ():
        value = value[name]
    return value


def _value(config: Any, field: str) -> Any:
    for name in field.split("."):
        config = getattr(config, name)
    return config


def _without(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    reduced = copy.deepcopy(dict(config))
    prefix, _, name = field.rpartition(".")
    _part(reduced, prefix).pop(name, None)
    return reduced


def _aliases(base: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    with suppress(Exception):
        config = read_config(base)
        nested = [(f"{name}.", getattr(config, name, None)) for name in base]
        for prefix, part in [("", config), *nested]:
            for alias, name in (getattr(part, "attribute_map", None) or {}).items():
                found[prefix + alias] = prefix + name
    known = flatten(base)
    return {alias: name for alias, name in found.items() if name in known}
