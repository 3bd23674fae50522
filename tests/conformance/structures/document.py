"""The JSON document of a structure. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.models.families.structure import ATTENTION
from tests.conformance.structures.facts import Facts, fields_of
from tests.conformance.structures.learn import LearnedRow

_ATTENTION = {
    "Attention": "full",
    "MMEncoderAttention": "vision",
    "EncoderOnlyAttention": "encoder",
}
RECURRENT, SMALL = "its recurrent layers", "its small parameters"


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
    unknown: set[str] = set()
    rows: list[dict[str, Any]] = []
    read: set[str] = set()
    for row in learned:
        made = _row(row, facts, unknown)
        if made is not None:
            rows.append(made)
            read |= fields_of(row)
    if unknown & {ATTENTION, RECURRENT}:
        unknown.add(ATTENTION)
        rows = [row for row in rows if row["is"] != "attention"]
    parts = {
        "architecture": architecture,
        "engine": engine,
        "unknown": sorted(unknown),
        "fixed": dict(fixed),
        "absent": {name: rule for name, rule in facts.absent.items() if name in read},
        "aliases": {alias: name for alias, name in facts.aliases.items() if name in read},
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in parts.items()]
    listed = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return "\n".join(["{", *lines, ' "rows": [', listed, " ]", "}", ""])


def _row(row: LearnedRow, facts: Facts, unknown: set[str]) -> dict[str, Any] | None:
    """A row of the document; None for one that stays unknown."""
    what = row.kind["what"]
    if what == "parameter" and None in row.sizes.values() and row.layers == "once":
        # Such as positions of a tower, which follow from the size of its images.
        unknown.add(SMALL)
        terms = {name: term or str(row.first[name]) for name, term in row.sizes.items()}
        row = row._replace(sizes=dict(terms))
    broken = (
        row.when is None
        or row.layers is None
        or (row.layers != "once" and row.of is None)
        or None in row.sizes.values()
    )
    if what == "state":
        unknown.add(RECURRENT)
        return None
    if what == "attention":
        return _attention(row, broken, unknown)
    if broken and what == "parameter" and len(row.sizes) < 2:
        unknown.add(SMALL)
        return None
    if broken:
        raise Unlearned(row.name)
    head: dict[str, Any] = {
        "is": what,
        "name": row.name.replace(".routed_experts", ""),
        "when": row.when,
        "layers": row.layers,
    }
    if row.of is not None:
        head["of"] = row.of
    if row.name in facts.plain:
        head["plain"] = True
    sizes = {name: term for name, term in row.sizes.items() if term is not None}
    if what == "linear":
        return _linear(head, sizes, row, facts)
    if what == "experts":
        fused = 1 if sizes["inner"] == sizes["width"] else 2
        return (
            head
            | {name: sizes[name] for name in ("count", "hidden", "width", "bias")}
            | {"fused": fused}
        )
    shape = [term for name, term in sorted(sizes.items()) if name.startswith("shape.")]
    if what == "vocab":
        return head | _parameter([sizes["rows"], sizes["columns"]], "", "vocab")
    if not shape:
        return None
    return head | _parameter(
        shape, row.kind.get("dtype", ""), facts.shards.get(row.name, "replicated")
    )


def _parameter(shape: list[str], dtype: str, shard: str) -> dict[str, Any]:
    return {"is": "parameter", "shape": shape, "dtype": dtype, "shard": shard}


def _attention(row: LearnedRow, broken: bool, unknown: set[str]) -> dict[str, Any] | None:
    kind = _ATTENTION.get(row.kind.get("class", ""))
    decodes = row.kind.get("class") != "Attention" or "ENCODER" not in row.kind.get("causal", "")
    shares = row.sizes.get("shares", "0") != "0"
    if broken or kind is None or not decodes or shares:
        unknown.add(ATTENTION)
        return None
    sizes = {name: row.sizes[name] for name in ("heads", "kv_heads", "head", "window", "sinks")}
    name = row.name.removesuffix("#attention")
    where = {"when": row.when, "layers": row.layers} | ({"of": row.of} if row.of else {})
    return {"is": "attention", "name": name, "kind": kind, **where, **sizes}


def _linear(
    head: dict[str, Any], sizes: Mapping[str, str], row: LearnedRow, facts: Facts
) -> dict[str, Any]:
    last = row.name.rpartition(".")[2]
    parts = [sizes[f"parts.{place}"] for place in range(row.kind["parts"])]
    if last == "conv1d":  # a short convolution, which no kernel multiplies
        weight = _parameter([" + ".join(parts), sizes["k"]], "", "column")
        return head | weight | {"name": f"{row.name}.weight"}
    made = head | {
        "shard": facts.shards.get(row.name, row.kind["shard"]),
        "k": sizes["k"],
        "parts": parts,
        "bias": sizes["bias"],
    }
    made |= {name: sizes[name] for name in ("heads", "kv_heads") if name in sizes}
    if sizes.get("exact") == "1":
        made["exact"] = True
    if last in facts.packed:
        made["modules"] = facts.packed[last]
    return made
