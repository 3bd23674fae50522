"""A config and its variations, each with the engine's build of it."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.structures.learn import (
    LAYER_COUNTS,
    flatten,
    is_vocabulary,
    patterns,
)
from tests.conformance.structures.observation import Row, observe

Path = tuple[str, ...]
Observed = tuple[dict[str, Any], dict[str, Row]]

# Fields that decide no shape: ids, rates, words for generation.
_SHAPELESS = re.compile(
    r"token_id|_id$|dropout|eps|initializer|theta|position|scal|temperature|version|use_cache"
    r"|output_|return_|chunk_size_feed|beam|length|penalty|ngram|top_[kp]$|problem_type|pruned"
    r"|dtype|id2label|label2id|std|coef|aux|jitter|loss|multiplier|softcap|limit|alpha"
    r"|beta|factor|is_encoder|is_decoder|_range|act$|activation|transformers|name_or_path"
    r"|architectures|model_type|early_stop|torchscript|finetuning|implementation"
)
_OFTEN_ZERO = re.compile(
    r"replace|shared|first|num_dense|interval|freq|step|pattern|offset|period|every|index"
)
_OPTIONAL_SIZE = re.compile(r"size|rank|dim|window|experts|heads|groups|replace")
_SMALL = 64
_MAX_PAIRS = 20


@dataclass
class Variations:
    """An engine's builds of a config and of configs that differ from it in one field or two.

    observed: (config, rows by name); the first is the base. fixed: fields that the engine accepts
    with one value only, by dotted name.
    """

    arguments: Mapping[str, Any]
    observed: list[Observed] = field(default_factory=list)
    fixed: dict[str, Any] = field(default_factory=dict)
    _accepted: set[str] = field(default_factory=set)
    _effective: dict[Path, Any] = field(default_factory=dict)

    @property
    def base(self) -> dict[str, Any]:
        return self.observed[0][0]

    def ask(self, config: dict[str, Any], *paths: Path) -> None:
        """Add the engine's build of a config in which `paths` differ. Raises its errors."""
        rows = observe(config, **self.arguments)
        self._accepted |= {".".join(path) for path in paths}
        if not self.observed or rows != self.observed[0][1]:
            self.observed.append((config, rows))
            if len(paths) == 1:
                self._effective[paths[0]] = _value_at(config, paths[0])

    def vary(self) -> None:
        """Ask for every variation of the base."""
        refusals: set[Path] = set()
        for path, value in _changes(self.base):
            try:
                self.ask(_put_value(self.base, path, value), path)
            except Exception:
                refusals.add(path)
        with suppress(Exception):
            self.ask(fewer_layers(self.base, 9))
        self._vary_layer_counts()
        self._vary_pairs(refusals)
        self._vary_layer_rules()
        self._vary_additions()
        base_fields = flatten(self.base)
        names = {".".join(path) for path in refusals} - self._accepted
        layers = {base_fields.get(name) for name in LAYER_COUNTS}
        self.fixed = {
            name: base_fields[name]
            for name in sorted(names)
            # One entry for each layer tells nothing of other numbers of layers.
            if name in base_fields
            and not (isinstance(base_fields[name], list) and len(base_fields[name]) in layers)
        }

    def _vary_layer_counts(self) -> None:
        """Change each number of layers of a part that has several, as of encoder and decoder."""
        parts: dict[Path, list[str]] = {}
        for name in flatten(self.base):
            *owner, last = name.split(".")
            if last in LAYER_COUNTS and type(_value_at(self.base, (*owner, last))) is int:
                parts.setdefault(tuple(owner), []).append(last)
        for part, names in parts.items():
            for name in names if len(names) > 1 else ():
                path = (*part, name)
                with suppress(Exception):
                    self.ask(_put_value(self.base, path, _value_at(self.base, path) + 1))

    def _vary_pairs(self, refused_paths: set[Path]) -> None:
        """Double two fields that the engine accepts together only."""
        lone_paths = sorted(
            path
            for path in refused_paths
            if type(_value_at(self.base, path)) is int and ".".join(path) not in self._accepted
        )
        pairs = [(a, b) for a in lone_paths for b in lone_paths if a < b and a[:-1] == b[:-1]]
        for first, second in pairs[:_MAX_PAIRS]:
            config = _put_value(self.base, first, 2 * _value_at(self.base, first))
            with suppress(Exception):
                self.ask(
                    _put_value(config, second, 2 * _value_at(self.base, second)), first, second
                )

    def _vary_layer_rules(self) -> None:
        """Change two fields at once by which layers differ: alone, one may look like another."""
        rules = [item for item in self._effective.items() if _OFTEN_ZERO.search(item[0][-1])]
        rules += [item for item in self._effective.items() if isinstance(item[1], list)]
        for (first, value), (second, second_value) in [*itertools.combinations(rules, 2)][
            :_MAX_PAIRS
        ]:
            with suppress(Exception):
                self.ask(
                    _put_value(_put_value(self.base, first, value), second, second_value),
                    first,
                    second,
                )

    def _vary_additions(self) -> None:
        """Vary the other fields beside a change that brings parts which the base lacks, and beside
        a switch between sizes."""
        known_patterns = patterns(self.observed[0][1])
        integers = {path: value for path, value in _changes(self.base) if type(value) is int}
        for path, value in [*self._effective.items()]:
            config = _put_value(self.base, path, value)
            rows = next((rows for other_path, rows in self.observed if other_path == config), {})
            switch = isinstance(value, bool) and _sizes(rows) != _sizes(self.observed[0][1], rows)
            if patterns(rows) <= known_patterns and not switch:
                continue
            known_patterns |= patterns(rows)
            for other_path, change in [*(integers if switch else self._effective).items()]:
                if other_path != path and type(change) is int:
                    with suppress(Exception):
                        self.ask(_put_value(config, other_path, change))


def _sizes(rows: Mapping[str, Row], names: Container[str] | None = None) -> dict[str, Any]:
    """Inputs, outputs and shapes by name."""
    return {
        name: (row.get("k"), row.get("parts"), row.get("shape"), row.get("kv_heads"))
        for name, row in rows.items()
        if names is None or name in names
    }


def variations(config: dict[str, Any], **arguments: Any) -> Variations:
    """vLLM's builds of a smaller config of this kind and its variations. Raises its errors."""
    variations = Variations(arguments)
    base = fewer_layers(config, 12)
    config_of_groups = _with_fewer_kv_heads(base)
    for candidate in (_with_own_sizes(config_of_groups), config_of_groups):
        with suppress(Exception):
            variations.ask(candidate)
            break
    else:
        variations.ask(base)
    variations.vary()
    return variations


def shape_fields(config: Mapping[str, Any], variations: Variations | None) -> dict[str, Any]:
    """The fields of the config that decide an engine's build, by dotted name: those whose variation
    changes it or is refused. Without variations: all that may."""
    config_fields = flatten(config)
    names = {".".join(path) for path, _ in _leaves(config)}
    if variations is not None and len(variations.observed) > 1:
        base = flatten(variations.base)
        names = {*variations.fixed}
        for other_path, _ in variations.observed:
            flat = flatten(other_path)
            names |= {name for name in base.keys() | flat if base.get(name) != flat.get(name)}
    counts = {name for name in config_fields if name.rpartition(".")[2] in LAYER_COUNTS}
    constant_fields = {
        name for name in names | counts if name in config_fields and not is_vocabulary(name)
    }
    return {name: config_fields[name] for name in sorted(constant_fields)}


def fewer_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The config with at most `count` layers, one less in each nested config, its lists cut
    alike."""
    smaller = copy.deepcopy(dict(config))
    for part in [smaller, *(value for value in smaller.values() if isinstance(value, dict))]:
        limit = count if part is smaller else max(5, count - 1)
        count = limit
        for name in LAYER_COUNTS:
            layers = part.get(name)
            if type(layers) is int and layers > limit:
                for owner in (part, *(value for value in part.values() if isinstance(value, dict))):
                    _cut_lists(owner, layers, limit)
                part[name] = limit
    return smaller


def _cut_lists(part: dict[str, Any], layers: int, limit: int) -> None:
    for name, value in [*part.items()]:
        if isinstance(value, list | str) and len(value) == layers:
            part[name] = value[:limit]
        elif isinstance(value, list) and len(value) == layers + 1 and "ratio" in name:
            part[name] = value[: limit + 1]  # with the layer that drafts
        elif (
            isinstance(value, list)
            and all(type(item) is int for item in value)
            and re.search("layer|idx|index", name)
        ):
            # Numbers from 1 have the number of layers too, or leave 0 out.
            part[name] = [item for item in value if item < limit + (layers in value)]


def _with_fewer_kv_heads(config: dict[str, Any]) -> dict[str, Any]:
    """The config with fewer KV heads than heads, so that their sizes differ."""
    config_copy = copy.deepcopy(config)
    for part in [
        config_copy,
        *(value for value in config_copy.values() if isinstance(value, dict)),
    ]:
        heads, hidden_size = part.get("num_attention_heads"), part.get("hidden_size")
        if type(heads) is not int or type(hidden_size) is not int:
            continue
        for name in ("num_key_value_heads", "num_kv_heads"):
            if part.get(name) == heads:
                times = 4 if heads % 4 else 1
                part |= {"num_attention_heads": times * heads, "hidden_size": times * hidden_size}
                part[name] = times * heads // 4
    return config_copy


def _with_own_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The config with other sizes for kinds of layers, such as `swa_head_dim`, than for the rest:
    layers of equal sizes would look like one kind."""
    config_copy = copy.deepcopy(config)
    for part in [
        config_copy,
        *(value for value in config_copy.values() if isinstance(value, dict)),
    ]:
        for name, value in [*part.items()]:
            equal_parts = [n for n in part if name.endswith(f"_{n}") and part[n] == value]
            if equal_parts and type(value) is int and value > 1:
                part[name] = 2 * value
    return config_copy


def _leaves(config: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        elif not _SHAPELESS.search(".".join((*path, name))) and name not in LAYER_COUNTS:
            yield (*path, name), value


def _changes(config: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Other values of every field that may decide a shape."""
    for path, value in _leaves(config):
        values: list[Any] = []
        if isinstance(value, bool):
            values = [not value]
        elif isinstance(value, int):
            values = _other_integers(path[-1], value)
        elif value is None and _OPTIONAL_SIZE.search(path[-1]):
            values = [_SMALL]
        elif isinstance(value, list) and len(value) > 1:
            values = [value[1:] + value[:1], value[::-1]]
        elif value == [] and "layers" in path[-1]:
            values = [[1]]
        for other_value in values:
            yield path, other_value
    # Model classes read this one also where the configuration class has no such field.
    for path, part in [
        ((), config),
        *(((n,), v) for n, v in config.items() if isinstance(v, dict)),
    ]:
        heads, hidden_size = part.get("num_attention_heads"), part.get("hidden_size")
        if type(heads) is int and type(hidden_size) is int and heads and "head_dim" not in part:
            yield (*path, "head_dim"), 2 * hidden_size // heads


def _other_integers(name: str, value: int) -> list[int]:
    if value == 0:
        return [1, 2]
    values = [2 * value, 3 * value] if "multiple" in name else [2 * value]
    if value > 2 and value % 2 == 0 and re.search("head|group|expert", name):
        values.append(value // 2)
    # One head or group more would not divide the sizes that engines divide by it.
    if value <= _SMALL and not re.search("(head|group)s?$", name):
        values.append(value + 1)
    if 1 < value <= _SMALL and _OFTEN_ZERO.search(name):
        values.append(0)
    return values


def _value_at(config: Mapping[str, Any], path: Path) -> Any:
    """The value of a field; None where the config has none."""
    value: Any = config
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _put_value(config: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    config_copy = copy.deepcopy(dict(config))
    part = config_copy
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return config_copy
