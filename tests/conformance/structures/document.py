"""The JSON document of a structure. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.models.families.model_structure import ATTENTION
from tests.conformance.structures.facts import Facts, fields_of, rule_fields
from tests.conformance.structures.learn import LearnedRow

_ATTENTION = ("full", "mla", "vision", "encoder", "cross")
SMALL = "its small parameters"
# Recurrent layers of the engine by their kind here.
_STATES = {
    "mamba1": "mamba1",
    "mamba2": "mamba2",
    "gdn_attn": "gdn",
    "kda": "kda",
    "short_conv": "short_conv",
}


class Unlearned(Exception):
    """A layer whose sizes follow no small term."""


def document(
    architecture: str,
    engine: str,
    fixed: Mapping[str, Any],
    learned: Iterable[LearnedRow],
    facts: Facts,
) -> str:
    """The text of the structure. Raises Unlearned, which names the layer."""
    architectures: set[str] = set()
    rows: list[dict[str, Any]] = []
    read: set[str] = set()
    learned = _with_whole_parts([*learned], facts)
    for row in learned:
        new_row = _row(row, facts, architectures)
        if new_row is not None:
            rows.append(new_row)
            read |= fields_of(row)
    if not any(row["is"] in ("attention", "state") for row in rows):
        architectures.add(ATTENTION)
    if ATTENTION in architectures:
        rows = [row for row in rows if row["is"] not in ("attention", "state")]
    read |= {*fixed}
    read |= {name for field in read for name in rule_fields(facts.absent.get(field, {}))}
    parts = {
        "architecture": architecture,
        "engine": engine,
        "unknown": sorted(architectures),
        "fixed": dict(fixed),
        "absent": {name: facts.absent[name] for name in sorted(read & {*facts.absent})},
        "aliases": {alias: name for alias, name in facts.aliases.items() if name in read},
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in parts.items()]
    row_text = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return "\n".join(["{", *lines, ' "rows": [', row_text, " ]", "}", ""])


def _with_whole_parts(learned: list[LearnedRow], facts: Facts) -> list[LearnedRow]:
    """Merged layers with two whole parts as those of attention: the groups of a Mamba 2 state are
    repeated."""
    states = {_owner(row): row for row in learned if row.kind.get("kind") == "mamba2"}
    rows = []
    for row in learned:
        whole = facts.whole.get(row.name, ())
        state = states.get(row.name.rpartition(".")[0])
        if len(whole) == 2 and state is not None:
            parts = [row.sizes[f"parts.{place}"] or "" for place in range(row.kind["parts"])]
            remaining_parts = [part for place, part in enumerate(parts) if place not in whole]
            cut = [" + ".join(remaining_parts), *(parts[place] for place in whole)]
            sizes = {name: term for name, term in row.sizes.items() if "parts." not in name}
            sizes |= {f"parts.{place}": part for place, part in enumerate(cut)}
            sizes |= {"heads": state.sizes["heads"], "kv_heads": state.sizes["groups"]}
            rows.append(row._replace(kind=row.kind | {"parts": 3, "shard": "qkv"}, sizes=sizes))
        else:
            rows.append(row)
    return rows


def _row(row: LearnedRow, facts: Facts, unknown: set[str]) -> dict[str, Any] | None:
    """A row of the document; None for one that stays unknown."""
    kind_name = row.kind["what"]
    if kind_name == "parameter" and None in row.sizes.values() and row.layers == "once":
        # Such as positions of a tower, which follow from the size of its images.
        unknown.add(SMALL)
        terms = {name: term or str(row.first[name]) for name, term in row.sizes.items()}
        row = row._replace(sizes=dict(terms))
    is_broken = (
        row.when is None
        or row.layers is None
        or (row.layers != "once" and row.of is None)
        or None in row.sizes.values()
    )
    if kind_name == "state":
        return _state(row, is_broken, unknown)
    if kind_name == "attention":
        return _attention(row, is_broken, unknown)
    if is_broken and kind_name == "parameter" and len(row.sizes) < 2:
        unknown.add(SMALL)
        return None
    if is_broken:
        raise Unlearned(row.name)
    head: dict[str, Any] = {
        "is": kind_name,
        "name": row.name.replace(".routed_experts", ""),
        "when": row.when,
        "layers": row.layers,
    }
    if row.of is not None:
        head["of"] = row.of
    if row.name in facts.plain:
        head["plain"] = True
    sizes = {name: term for name, term in row.sizes.items() if term is not None}
    if kind_name == "linear":
        return _linear(head, sizes, row, facts)
    if kind_name == "experts":
        matrix_count = 1 if sizes["inner"] == sizes["width"] else 2
        return (
            head
            | {name: sizes[name] for name in ("count", "hidden", "width", "bias")}
            | {"fused": matrix_count}
        )
    shape = [term for name, term in sorted(sizes.items()) if name.startswith("shape.")]
    if kind_name == "vocab":
        return head | _parameter([sizes["rows"], sizes["columns"]], "", "vocab")
    if not shape:
        return None
    return head | _parameter(
        shape, row.kind.get("dtype", ""), facts.shards.get(row.name, "replicated")
    )


def _parameter(shape: list[str], dtype: str, shard: str) -> dict[str, Any]:
    return {"is": "parameter", "shape": shape, "dtype": dtype, "shard": shard}


def _attention(row: LearnedRow, broken: bool, unknown: set[str]) -> dict[str, Any] | None:
    kind = row.kind["kind"]
    decodes = kind != "full" or "ENCODER" not in row.kind.get("causal", "")
    shares = row.sizes.get("shares", "0") != "0"
    if broken or kind not in _ATTENTION or not decodes or shares:
        unknown.add(ATTENTION)
        return None
    sizes = {name: row.sizes[name] for name in ("heads", "kv_heads", "head", "window", "sinks")}
    if row.sizes["value"] != sizes["head"]:
        sizes["value"] = row.sizes["value"]
    for name in ("index", "alibi"):
        if row.sizes[name] != "0":
            sizes[name] = row.sizes[name]
    return {"is": "attention", "name": _owner(row), "kind": kind, **_layers(row), **sizes}


def _state(row: LearnedRow, broken: bool, unknown: set[str]) -> dict[str, Any] | None:
    kind = _STATES.get(row.kind["kind"])
    if broken or kind is None:
        unknown.add(ATTENTION)
        return None
    names = ("heads", "rows", "columns", "groups", "channels", "kernel")
    sizes = {name: row.sizes[name] for name in names}
    head = {"is": "state", "name": _owner(row), "kind": kind, "dtype": row.kind["dtype"]}
    return head | _layers(row) | sizes


def _owner(row: LearnedRow) -> str:
    return row.name.partition("#")[0]


def _layers(row: LearnedRow) -> dict[str, Any]:
    return {"when": row.when, "layers": row.layers} | ({"of": row.of} if row.of else {})


def _units(sizes: Mapping[str, str], row: LearnedRow, facts: Facts) -> list[str]:
    """How many of each part the ranks share, where some parts are whole on every rank."""
    whole, count = facts.whole.get(row.name, ()), row.kind["parts"]
    qkv = "kv_heads" in sizes
    if count == 1 or (count == 3 if qkv else not whole):
        return []
    rest = [sizes["heads"], *[sizes["kv_heads"]] * (count - 1)] if qkv else ["0"] * count
    return ["1" if place in whole else unit for place, unit in enumerate(rest)]


def _linear(
    head: dict[str, Any], sizes: Mapping[str, str], row: LearnedRow, facts: Facts
) -> dict[str, Any]:
    last = row.name.rpartition(".")[2]
    parts = [sizes[f"parts.{place}"] for place in range(row.kind["parts"])]
    if last.endswith("conv1d") or last == "conv":  # no kernel multiplies a short convolution
        head["plain"] = True
    row_fields = head | {
        "shard": "qkv" if "kv_heads" in sizes else facts.shards.get(row.name, row.kind["shard"]),
        "k": sizes["k"],
        "parts": parts,
        "bias": sizes["bias"],
    }
    row_fields |= {name: sizes[name] for name in ("heads", "kv_heads") if name in sizes}
    if units := _units(sizes, row, facts):
        row_fields["units"] = units
    # Every rank has such parts whole, as those of one KV head.
    if row_fields.get("kv_heads") == "0":
        row_fields["kv_heads"] = "1"
    if sizes.get("exact") == "1":
        row_fields["exact"] = True
    if last in facts.packed:
        row_fields["modules"] = facts.packed[last]
    return row_fields
