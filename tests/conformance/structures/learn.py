"""Rows of a structure from an engine's builds of a config and its variations. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.conformance.structures.terms import (
    condition_term,
    flagged_term,
    last_layer_term,
    layers_term,
)

LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "depth",
    "encoder_layers",
    "decoder_layers",
)
_LAYER = re.compile(r"(?<=layers\.|blocks\.)\d+(?=[.#]|$)|(?<=\.h\.)\d+(?=[.#]|$)")
_LAYER_WORD = re.compile(r"(?<=\.layer\.)\d+(?=[.#]|$)")
# Fields by which layers differ; the engine may refuse every other value of one.
LAYER_RULE = re.compile(r"offset|period|first|replace|interval|step|freq|dense|hash")
_MAX_CLUSTERS = 5
_FLAGS = ("bias", "exact", "shares", "sinks", "alibi")


class Cluster(NamedTuple):
    """Layers in which one name has one kind and the same sizes. layers: None outside of layers."""

    layers: tuple[int, ...] | None
    sizes: dict[str, int]
    kind: tuple[tuple[str, Any], ...]


class LearnedRow(NamedTuple):
    """Layers that an engine builds under a name. A term is None where no small one fits.

    when: condition; layers: of the layer number; of: the field with the number of layers; sizes:
    terms by name; first: the sizes where they were seen first; kind: the other properties.
    """

    name: str
    kind: dict[str, Any]
    when: str | None
    layers: str | None
    of: str | None
    sizes: dict[str, str | None]
    first: dict[str, int]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a config by dotted name."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            values |= flatten(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


def pattern_of(name: str) -> tuple[str, int | None]:
    """A name with its layer number as `*`, and the number."""
    match = _LAYER.search(name) or _LAYER_WORD.search(name)
    if match is None:
        return name, None
    return f"{name[: match.start()]}*{name[match.end() :]}", int(match.group())


def patterns(rows: Mapping[str, Any]) -> set[str]:
    return {pattern_of(name)[0] for name in rows}


def _clusters(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Cluster]]:
    clusters: dict[str, dict[Any, list[int | None]]] = {}
    for name, row in rows.items():
        pattern, number = pattern_of(name)
        sizes: list[tuple[str, int]] = []
        kind: list[tuple[str, Any]] = []
        for key, value in row.items():
            if isinstance(value, list):
                kind.append((key, len(value)))
                sizes += [(f"{key}.{place}", item) for place, item in enumerate(value)]
            elif isinstance(value, int):
                sizes.append((key, value))
            elif key != "method":
                kind.append((key, value))
        key_of = (tuple(sorted(sizes)), tuple(sorted(kind)))
        clusters.setdefault(pattern, {}).setdefault(key_of, []).append(number)
    return {
        pattern: [
            Cluster(
                None if None in numbers else tuple(n for n in numbers if n is not None),
                dict(sizes),
                kind,
            )
            for (sizes, kind), numbers in clusters.items()
        ]
        for pattern, clusters in clusters.items()
    }


def _likeness(seed: Cluster, cluster: Cluster) -> float:
    """How many sizes and layers are equal; sizes count thrice."""
    equal = sum(seed.sizes.get(name) == size for name, size in cluster.sizes.items())
    likeness = 1.0
    if seed.layers is not None and cluster.layers is not None:
        seed_layers, other_layers = {*seed.layers}, {*cluster.layers}
        likeness = len(seed_layers & other_layers) / len(seed_layers | other_layers)
    return likeness + 3 * equal / max(1, len(cluster.sizes))


def _most_similar(seeds: Sequence[Cluster], clusters: Sequence[Cluster]) -> list[Cluster | None]:
    """For each of the seeds, which are of one kind, its cluster: together the most alike.

    A cluster that is left over goes to no seed; a seed that is left over takes the most alike.
    """
    similar_clusters = [
        candidate
        for candidate in clusters
        if candidate.kind == seeds[0].kind
        and (candidate.layers is None) == (seeds[0].layers is None)
    ]
    if not similar_clusters:
        return [None] * len(seeds)
    if len(similar_clusters) < len(seeds) or len(similar_clusters) > _MAX_CLUSTERS:
        return [
            max(similar_clusters, key=lambda cluster: _likeness(seed, cluster)) for seed in seeds
        ]
    return [
        *max(
            itertools.permutations(similar_clusters, len(seeds)),
            key=lambda candidates: sum(map(_likeness, seeds, candidates)),
        )
    ]


class _Learner:
    def __init__(self, observed: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
        self._envs = [flatten(config) for config, _ in observed]
        self._clusters = [_clusters(rows) for _, rows in observed]
        self._changes = [self._difference(0, place) for place in range(len(observed))]

    def _difference(self, first: int, second: int) -> set[str]:
        first_env, second_env = self._envs[first], self._envs[second]
        return {
            name
            for name in first_env.keys() | second_env.keys()
            if first_env.get(name) != second_env.get(name)
        }

    def _layer_count(self, pattern: str, place: int) -> int:
        prefix = pattern.partition("*")[0]
        numbers = [
            max(cluster.layers)
            for name, clusters in self._clusters[place].items()
            if "*" in name and name.partition("*")[0] == prefix
            for cluster in clusters
            if cluster.layers
        ]
        return max(numbers, default=-1) + 1

    def _count_field(self, pattern: str) -> str | None:
        """The term for the number of layers: a field, or up to the layer that another names."""
        rows = [(self._envs[n], self._layer_count(pattern, n)) for n in range(len(self._envs))]
        rows = [(env, count) for env, count in rows if count]
        names = [name for name in self._envs[0] if name.rpartition(".")[2] in LAYER_COUNTS]
        fields = [name for name in names if all(env.get(name) == count for env, count in rows)]
        if fields:
            return min(fields, key=lambda name: (name.count("."), len(name)))
        return last_layer_term(names, rows)

    def rows(self) -> list[LearnedRow]:
        rows = []
        for pattern in sorted({name for clusters in self._clusters for name in clusters}):
            seeds: list[Cluster] = []
            for place, clusters in enumerate(self._clusters):
                for cluster in clusters.get(pattern, ()):
                    if place == 0 or all(cluster.kind != seed.kind for seed in seeds):
                        seeds.append(cluster)
            for kind in dict.fromkeys(seed.kind for seed in seeds):
                rows += self._rows(pattern, [seed for seed in seeds if seed.kind == kind])
        return rows

    def _rows(self, pattern: str, seeds: Sequence[Cluster]) -> list[LearnedRow]:
        """The rows of seeds of one kind."""
        matches = [_most_similar(seeds, clusters.get(pattern, ())) for clusters in self._clusters]
        return [
            self._row(pattern, seed, [match[number] for match in matches])
            for number, seed in enumerate(seeds)
        ]

    def _row(self, pattern: str, seed: Cluster, matches: Sequence[Cluster | None]) -> LearnedRow:
        matches_by_place = {
            place: match for place, match in enumerate(matches) if match is not None
        }
        layers: str | None = "once"
        of, when = None, self._condition(matches)
        if seed.layers is not None:
            of = self._count_field(pattern)
            # No such layer is an empty set of layers, where one term says so.
            layers = self._layers(pattern, dict(enumerate(matches)))
            if layers is None:
                layers = self._layers(pattern, matches_by_place)
            else:
                when = "always"
        sizes = {name: self._size(name, matches_by_place) for name in seed.sizes}
        return LearnedRow(
            pattern,
            dict(seed.kind),
            when,
            layers,
            of,
            sizes,
            matches_by_place[min(matches_by_place)].sizes,
        )

    def _condition(self, matches: Sequence[Cluster | None]) -> str | None:
        present = [match is not None for match in matches]
        differing = [
            change
            for change, present_fields in zip(self._changes, present, strict=True)
            if present_fields != present[0]
        ]
        lone_names = {
            name for change_set in differing if len(change_set) == 1 for name in change_set
        }
        rows = [*zip(self._envs, present, strict=True)]
        return condition_term(lone_names, rows) or condition_term(set().union(*differing), rows)

    def _layers(self, pattern: str, matches: Mapping[int, Cluster | None]) -> str | None:
        kinds = len(self._clusters[0].get(pattern, ()))
        layers = {
            place: (match.layers or ()) if match else ()
            for place, match in matches.items()
            # Kinds of layers that got equal sizes tell nothing.
            if match is None or len(self._clusters[place][pattern]) >= kinds
        }
        first_layer = min(layers)
        fields = {
            name
            for name, value in self._envs[first_layer].items()
            if isinstance(value, list) or (type(value) is int and LAYER_RULE.search(name))
        }
        for place, numbers in layers.items():
            differences = self._difference(first_layer, place)
            # A field that takes the row away from all layers is a condition.
            if (
                len(differences) == 1
                and numbers != layers[first_layer]
                and numbers
                and layers[first_layer]
            ):
                fields |= differences
        rows = [
            (self._envs[place], self._layer_count(pattern, place), numbers)
            for place, numbers in layers.items()
        ]
        return layers_term(fields, rows)

    def _size(self, name: str, clusters: Mapping[int, Cluster]) -> str | None:
        rows, fields = self._vary(name, clusters)
        if name not in _FLAGS:
            return flagged_term(fields, rows)
        term = condition_term(fields, [(env, bool(value)) for env, value in rows])
        if term == "always":
            return "1"
        return term if any(value for _, value in rows) else "0"

    def _vary(
        self, name: str, clusters: Mapping[int, Cluster]
    ) -> tuple[list[tuple[Mapping[str, Any], int]], set[str]]:
        """The size `name` with each config, and the fields that change it: alone, beside one other
        change, or together with another field."""
        first = min(clusters)
        sizes = {place: match.sizes[name] for place, match in clusters.items()}
        differences = {place: self._difference(first, place) for place in clusters}
        fields: set[str] = set()
        for place, change in differences.items():
            one_less = [
                (other_name, more)
                for other_name in clusters
                if len(change) - len(differences[other_name]) == 1
                and len(more := self._difference(other_name, place)) == 1
            ]
            for other_name, more in one_less:
                fields |= more if sizes[place] != sizes[other_name] else set()
            if not one_less and len(change) == 2 and sizes[place] != sizes[first]:
                fields |= change
        return [(self._envs[place], size) for place, size in sizes.items()], fields


def learn(
    observed: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> list[LearnedRow]:
    """The rows that describe every observation (config, rows by name); the first is the base."""
    return _Learner(observed).rows()


def one_shape(config: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> list[LearnedRow]:
    """The rows of one observation, whose sizes are numbers: they hold for configs of that shape.

    The size of the vocabulary stays a field: tuned models add tokens.
    """
    shape_rows = []
    words = {value: name for name, value in flatten(config).items() if is_vocabulary(name)}
    for pattern, clusters in sorted(_clusters(rows).items()):
        count = 1 + max((max(cluster.layers) for cluster in clusters if cluster.layers), default=0)
        for each_cluster in clusters:
            sizes: dict[str, str | None] = {
                name: str(size) for name, size in each_cluster.sizes.items()
            }
            rows_of = each_cluster.sizes.get("rows")
            if rows_of in words and dict(each_cluster.kind)["what"] == "vocab":
                sizes["rows"] = words[rows_of]
            layers, of = "once", None
            if each_cluster.layers is not None:
                has_all_layers = len(each_cluster.layers) == count
                layers = "all" if has_all_layers else f"i in {tuple(sorted(each_cluster.layers))}"
                of = str(count)
            kind = dict(each_cluster.kind)
            shape_rows.append(
                LearnedRow(pattern, kind, "always", layers, of, sizes, each_cluster.sizes)
            )
    return shape_rows


def is_vocabulary(name: str) -> bool:
    """Whether a field by dotted name is the size of a vocabulary."""
    return name.rpartition(".")[2] == "vocab_size"
