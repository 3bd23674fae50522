"""Facts of an architecture beside its rows: shards, quantization, absent fields, other names."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from gateway.engines.inside.meta import write_folder
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
    """Facts of a family that its weightless build shows.

    shards: the shards by pattern, at a tensor parallel size of 2.
    whole: the merged parts by pattern that every rank then has whole.
    plain: patterns of layers that FP8 leaves alone.
    absent, aliases: the fields of these names in gateway/models/families/model_structure.py.
    packed: names that a checkpoint has for a fused layer.
    """

    shards: dict[str, str]
    whole: dict[str, tuple[int, ...]]
    plain: set[str]
    absent: dict[str, dict[str, Any]]
    aliases: dict[str, str]
    packed: dict[str, list[str]]


def facts_of(
    base: dict[str, Any],
    built: Mapping[str, Mapping[str, Any]],
    rows: Iterable[LearnedRow],
    fixed: Iterable[str] = (),
    **arguments: Any,
) -> Facts:
    """The facts of the architecture of `base`. built: its rows by name on one rank. fixed: fields
    beside those of the rows' terms."""
    plain: set[str] = set()
    with suppress(Exception):
        plain = {
            pattern_of(name)[0]
            for name, row in observe(base | _FP8, **arguments).items()
            if "Unquantized" in row.get("method", "")
        }
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    # An architecture that is not listed is built by transformers' class, layer by layer.
    model_class = registry.ModelRegistry.models.get(base["architectures"][0])
    model = model_class.load_model_cls() if model_class else None
    packed_modules = getattr(model, "packed_modules_mapping", None) or {}
    cut: Mapping[str, Mapping[str, Any]] = {}
    with suppress(Exception):
        cut = observe(base, 2, **arguments)
    return Facts(
        _shards(built, cut),
        _whole(built, cut),
        plain,
        _absent(base, {name for row in rows for name in fields_of(row)}.union(fixed)),
        _aliases(base),
        {name: [*parts] for name, parts in packed_modules.items() if [*parts] != [name]},
    )


def fields_of(row: LearnedRow) -> set[str]:
    """The fields that the terms of a row read."""
    terms = [row.when, row.layers, row.of, *row.sizes.values()]
    text = " ".join(re.sub(r"'[^']*'|\[i\]", "", term) for term in terms if term)
    return {*_NAME.findall(text)} - _WORDS


def rule_fields(rule: Mapping[str, Any]) -> set[str]:
    """The fields that a rule for an absent field reads."""
    return {*_NAME.findall(f"{rule.get('each', '')} {rule.get('of', '')}")} - _WORDS


def _shards(
    built: Mapping[str, Mapping[str, Any]], cut: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    shards: dict[str, str] = {}
    for name, row in cut.items():
        pattern, _ = pattern_of(name)
        if row["what"] == "linear":
            shards[pattern] = row["shard"]
        elif row["what"] == "parameter" and name in built:
            is_divided = built[name]["shape"][:1] != row["shape"][:1]
            shards[pattern] = "column" if is_divided else "replicated"
    return shards


def _whole(
    built: Mapping[str, Mapping[str, Any]], cut: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[int, ...]]:
    """The fewest parts of a merged layer that explain how many outputs a rank of two has."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, row in cut.items():
        if row["what"] != "linear" or row["shard"] not in ("column", "merged", "qkv"):
            continue
        parts, outputs = built[name]["parts"], row["outputs"]
        if row["shard"] == "qkv" and len(parts) == 3:
            continue
        places = range(len(parts))
        choices = (subset for size in places for subset in itertools.combinations(places, size))
        whole = next(
            (c for c in choices if sum(parts) + sum(parts[n] for n in c) == 2 * outputs), ()
        )
        if whole:
            shapes[pattern_of(name)[0]] = whole
    return shapes


def read_config(config: Mapping[str, Any]) -> Any:
    """The configuration object that vLLM makes of a config.json."""
    reader: Any = importlib.import_module("vllm.transformers_utils.config")
    with write_folder({"config.json": json.dumps(config).encode()}) as folder:
        return reader.get_config(folder, trust_remote_code=False)


def _absent(base: Mapping[str, Any], fields: set[str]) -> dict[str, dict[str, Any]]:
    """By field, its value where the config lacks it: constant, periodic, or a term."""
    varied_configs = [base]
    for names in (("hidden_size",), ("num_attention_heads",)):
        varied_config = copy.deepcopy(dict(base))
        for part in [
            varied_config,
            *(value for value in varied_config.values() if isinstance(value, dict)),
        ]:
            for name in names:
                if type(part.get(name)) is int:
                    part[name] *= 2
        varied_configs.append(varied_config)
    defaults: dict[str, dict[str, Any]] = {}
    waiting = sorted(fields)
    for field in waiting:
        with suppress(Exception):
            values = [
                _value(read_config(_drop_field(config, field)), field) for config in varied_configs
            ]
            if isinstance(values[0], list) and values[0]:
                rule = _list_rule(base, field, values[0])
            else:
                rule = _rule(field, values, varied_configs)
            if rule is not None:
                defaults[field] = rule
                waiting += sorted(rule_fields(rule) - {*waiting})
    return defaults


def _list_rule(base: Mapping[str, Any], field: str, first: list[Any]) -> dict[str, Any] | None:
    """The rule for the list that a config without the field gets: from another list, by a field
    that tells which layers differ, or periodic. None: it follows from another field otherwise."""
    prefix = field.rpartition(".")[0]
    prefix_text = f"{prefix}." if prefix else ""

    def read(name: str, value: Any) -> list[Any]:
        config = copy.deepcopy(dict(base))
        _part(config, prefix)[name] = value
        return list(_value(read_config(_drop_field(config, field)), field))

    for name, value in _part(base, prefix).items():
        if prefix_text + name == field:
            continue
        if isinstance(value, list) and len(value) >= len(first) > 1:
            rotation = value[1:] + value[:1]
            with suppress(Exception):
                pairs = [
                    *zip(value, first, strict=False),
                    *zip(rotation, read(name, rotation), strict=False),
                ]
                words = dict(pairs)
                if len({*words.values()}) > 1 and all(words[item] == word for item, word in pairs):
                    return {"of": prefix_text + name, "words": [[*pair] for pair in words.items()]}
        elif type(value) is int and LAYER_RULE.search(name):
            with suppress(Exception):
                next_value = read(name, value + 1)
                if next_value != first:
                    return _each_rule(prefix_text + name, [(value, first), (value + 1, next_value)])
    for period in range(1, len(first) // 2 + 1):
        if all(item == first[place % period] for place, item in enumerate(first)):
            return {"period": first[:period]}
    return None


def _each_rule(name: str, items_by_layer: list[tuple[int, list[Any]]]) -> dict[str, Any] | None:
    """One of two items by a term over the layer number and the field, in each (value, list)."""
    terms: dict[str, Callable[[int, int], bool]] = {
        f"i < {name}": lambda i, value: i < value,
        f"(i + 1) % {name} == 0": lambda i, value: bool(value) and (i + 1) % value == 0,
        f"i % {name} == 0": lambda i, value: bool(value) and i % value == 0,
    }
    for text, holds in terms.items():
        items = {
            truth: {
                json.dumps(item)
                for value, items in items_by_layer
                for place, item in enumerate(items)
                if holds(place, value) == truth
            }
            for truth in (True, False)
        }
        if all(len(item_values) == 1 for item_values in items.values()):
            return {"each": text, "is": [json.loads(min(items[truth])) for truth in (True, False)]}
    return None


def _rule(field: str, values: list[Any], configs: list[Any]) -> dict[str, Any] | None:
    first_value = values[0]
    if any(value != first_value for value in values):
        prefix = field.rpartition(".")[0]
        parts = [_part(config, prefix) for config in configs]
        for term, compute in _DERIVED.items():
            if [compute(part) for part in parts] == values:
                return {"text": _NAME.sub(rf"{prefix}.\g<0>" if prefix else r"\g<0>", term)}
        return None
    return {"is": first_value} if isinstance(first_value, bool | int | str | None | list) else None


def _part(config: Mapping[str, Any], prefix: str) -> Any:
    value: Any = config
    for name in prefix.split(".") if prefix else ():
        value = value[name]
    return value


def _value(config: Any, field: str) -> Any:
    for name in field.split("."):
        config = getattr(config, name)
    return config


def _drop_field(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    config_copy = copy.deepcopy(dict(config))
    prefix, _, name = field.rpartition(".")
    _part(config_copy, prefix).pop(name, None)
    return config_copy


def _aliases(base: Mapping[str, Any]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    with suppress(Exception):
        config = read_config(base)
        nested_configs = [(f"{name}.", getattr(config, name, None)) for name in base]
        for prefix, part in [("", config), *nested_configs]:
            for alias, name in (getattr(part, "attribute_map", None) or {}).items():
                aliases[prefix + alias] = prefix + name
    known_flatten = flatten(base)
    return {alias: name for alias, name in aliases.items() if name in known_flatten}
