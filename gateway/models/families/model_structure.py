"""The blueprint of a model from its structure: the engine's layers, as terms of config fields.

A structure is learned from the engine's own model class (scripts/engine-structures) and stands in
gateway/models/structures/ARCHITECTURE.json:

    rows      layers, parameters, attention and recurrent states of the model; each size is a term,
              such as "num_attention_heads*head_dim"
    when      the condition of a row; "always", or a term
    layers    the layers of a row: "all", "once", or a term over the layer number `i`
    of        the field with the number of layers that `*` in the name stands for
    fixed     by field, its value in every config that the structure holds for
    absent    by field, its value in a config.json without it, as the engine reads that: "is" a
              constant, "text" a term, "period" repeated for all layers, "each" the first or the
              second of "is" by a term over `i`, "of" the "words" for another field's items
    aliases   other names of fields
    unknown   parts that the terms do not describe; they stay a guess

Where no small terms fit, the sizes are numbers and `fixed` names every field that decides them: the
structure holds for configs of that shape.

Terms are a small part of Python's expressions (`_term_value`). Pure.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from gateway.domain import AttentionGroup, Recurrent, TensorGroup
from gateway.errors import BadModel
from gateway.models.families.blueprint import Blueprint, LinearLayer, Shard
from gateway.models.families.config import Fields

# The unknown part for which the guess of a family without a structure is taken.
ATTENTION = "its attention"
_MAX_LAYERS = 2000
_NO_VALUE = object()
# The remainder of a division by 0, as of layers that differ "every 0": it equals no layer's.
_NO_REST = -1
_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b if b else _NO_REST,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.GtE: lambda a, b: a >= b,
    ast.Lt: lambda a, b: a < b,
    ast.In: lambda a, b: a in (b or ()),
    ast.NotIn: lambda a, b: a not in (b or ()),
}


class _Config:
    """The fields of a config.json by dotted name, with other names and values of absent fields."""

    def __init__(self, structure: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._absent_value = structure["absent"]
        self._aliases: dict[str, list[str]] = {}
        for alias, name in structure["aliases"].items():
            self._aliases.setdefault(name, []).append(alias)
        self._config = config
        self._values: dict[str, Any] = {}

    def field(self, name: str) -> Any:
        """The value of a field; None where neither config nor engine has one."""
        if name not in self._values:
            self._values[name] = self._read(name)
        return self._values[name]

    def _read(self, name: str) -> Any:
        stated_values = [
            self._lookup(spelling) for spelling in (name, *self._aliases.get(name, ()))
        ]
        values = [value for value in stated_values if value is not None and value is not _NO_VALUE]
        if not {"each", "of", "period"}.isdisjoint(self._absent_value.get(name, {})):
            # An empty list names no layer's kind: engines then fill it in.
            values = [value for value in values if value != []]
        if values:
            return values[0]
        # A null stays one where the engine has a constant for a config without the field.
        if None in stated_values and "is" in self._absent_value.get(name, {}):
            return None
        return self._default(name)

    def _lookup(self, name: str) -> Any:
        value: Any = self._config
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return _NO_VALUE
            value = value[part]
        return value

    def _default(self, name: str) -> Any:
        rule = self._absent_value.get(name, {})
        if "text" in rule:
            return _term_value(_parse_term(rule["text"]), self, 0)
        if "each" in rule:
            term, (positive_value, negative_value) = _parse_term(rule["each"]), rule["is"]
            return [
                positive_value if _term_value(term, self, number) else negative_value
                for number in range(_MAX_LAYERS)
            ]
        if "of" in rule:
            item_by_word = dict(rule["words"])
            items = self.field(rule["of"])
            return [item_by_word.get(item) for item in items] if isinstance(items, list) else None
        if "period" in rule:
            return [*rule["period"]] * (_MAX_LAYERS // len(rule["period"]))
        return rule.get("is")


@lru_cache(maxsize=4096)
def _parse_term(term: str) -> ast.expr:
    return ast.parse(term, mode="eval").body


def _term_value(node: ast.expr, config: _Config, number: int) -> Any:
    """The value of a term in layer `number`. Raises TypeError, IndexError, ZeroDivisionError for
    fields of another type than the engine's."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="i"):
            return number
        case ast.Name() | ast.Attribute():
            return config.field(ast.unparse(node))
        case ast.Tuple(elts=parts):
            return [_term_value(part, config, number) for part in parts]
        case ast.Subscript(value=value, slice=index):
            return _term_value(value, config, number)[_term_value(index, config, number)]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _term_value(operand, config, number)
        case ast.BoolOp(op=operator, values=values):
            combine = all if isinstance(operator, ast.And) else any
            return combine(_term_value(part, config, number) for part in values)
        case ast.IfExp(test=test, body=body, orelse=alternative):
            return _term_value(
                body if _term_value(test, config, number) else alternative, config, number
            )
        case (
            ast.BinOp(left=left_operand, op=operator, right=right)
            | ast.Compare(left=left_operand, ops=[operator], comparators=[right])
        ):
            pair = _term_value(left_operand, config, number), _term_value(right, config, number)
            # A text times a number would be as long as a config wants.
            if isinstance(node, ast.BinOp) and any(type(part) is not int for part in pair):
                raise TypeError(ast.unparse(node))
            return _OPERATORS[type(operator)](*pair)
    raise TypeError(ast.unparse(node))


class _Reader:
    """The rows of a structure for one config.json."""

    def __init__(self, structure: Mapping[str, Any], fields: Fields) -> None:
        self._config = _Config(structure, fields.config)
        self._fields = fields

    def term(self, text: str, number: int = 0) -> Any:
        try:
            return _term_value(_parse_term(text), self._config, number)
        except (TypeError, IndexError, ZeroDivisionError, KeyError):
            raise BadModel(
                f"config.json of {self._fields.source} has no usable value for {text}.",
                hint="Compare it with the config.json of the publisher.",
            ) from None

    def size(self, text: str) -> int:
        value = self.term(text)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 10**12:
            raise BadModel(
                f"config.json of {self._fields.source} gives no size for {text}.",
                hint="Compare it with the config.json of the publisher.",
            )
        return value

    def field_value(self, name: str) -> Any:
        """The value of a field of the config, or of its text model."""
        text = self._fields.config.get("text_config")
        parts = (text, self._fields.config) if isinstance(text, Mapping) else (self._fields.config,)
        return next((part[name] for part in parts if name in part), None)

    def is_empty(self, row: Mapping[str, Any]) -> bool:
        """Whether a layer has no width, as of no shared experts."""
        if row["is"] == "linear":
            return not (self.size(row["k"]) and all(self.size(part) for part in row["parts"]))
        return bool(row["is"] == "experts" and not self.size(row["count"]))

    def numbers(self, row: Mapping[str, Any]) -> Sequence[int]:
        """The layers that have the row; one without a number: (0,)."""
        if row["when"] != "always" and not self.term(row["when"]):
            return ()
        if row["layers"] == "once":
            return (0,)
        count = self.size(row["of"])
        if count > _MAX_LAYERS:
            raise self._fields.field_error(row["of"], f"at most {_MAX_LAYERS}")
        if row["layers"] == "all":
            return range(count)
        return [number for number in range(count) if self.term(row["layers"], number)]


def structure_blueprint(text: str, fields: Fields) -> Blueprint:
    """The blueprint of this config.json by the structure with this JSON text.

    Raises BadModel where the config lacks a field that has no known default.
    """
    structure = json.loads(text)
    reader = _Reader(structure, fields)
    for name, value in structure["fixed"].items():
        stated_value = reader.term(name)
        if stated_value not in (value, None):
            raise BadModel(
                f"config.json of {fields.source} has {name}={stated_value}, and the layers of"
                f" {structure['architecture']} are known for {name}={value} only.",
                hint="Compare it with the config.json of the publisher.",
            )
    rows = [(row, reader.numbers(row)) for row in structure["rows"]]
    present_rows = [(row, numbers) for row, numbers in rows if numbers and not reader.is_empty(row)]
    return Blueprint(
        tuple(_linears(reader, present_rows)),
        tuple(_attention_groups(reader, present_rows)),
        tuple(_parameters(reader, present_rows)),
        tuple(structure["unknown"]),
    )


_Rows = Iterable[tuple[Mapping[str, Any], Sequence[int]]]


def _linears(reader: _Reader, rows: _Rows) -> Iterable[LinearLayer]:
    """The linear layers of a learned structure, with the sizes of this config."""
    for row, numbers in rows:
        if row["is"] == "linear":
            yield LinearLayer(
                name=row["name"],
                numbers=numbers,
                k=reader.size(row["k"]),
                parts=tuple(reader.size(part) for part in row["parts"]),
                shard=cast("Shard", row["shard"]),
                modules=tuple(row.get("modules", ())),
                is_quantizable=not row.get("plain"),
                heads=reader.size(row.get("heads", "0")),
                kv_heads=reader.size(row.get("kv_heads", "0")),
                units=tuple(reader.size(unit) for unit in row.get("units", ())),
                bias=bool(reader.term(row["bias"])),
                is_exact=bool(row.get("exact")),
            )
        elif row["is"] == "experts":
            width = reader.size(row["width"])
            hidden = reader.size(row["hidden"])
            count = reader.size(row["count"])
            bias = bool(reader.term(row["bias"]))
            inner_widths = (width,) * row["fused"]
            for name, k, parts, shard in (
                ("w13", hidden, inner_widths, "expert_column"),
                ("w2", width, (hidden,), "expert_row"),
            ):
                yield LinearLayer(
                    f"{row['name']}.{name}",
                    numbers,
                    k,
                    parts,
                    cast("Shard", shard),
                    is_quantizable=not row.get("plain"),
                    experts=count,
                    bias=bias,
                )


def _parameters(reader: _Reader, rows: _Rows) -> Iterable[TensorGroup]:
    for row, numbers in rows:
        if row["is"] == "parameter":
            yield TensorGroup(
                name=row["name"],
                count=len(numbers),
                shape=tuple(reader.size(size) for size in row["shape"]),
                dtype=row["dtype"],
                shard=row["shard"],
            )


def _attention_groups(reader: _Reader, rows: _Rows) -> Iterable[AttentionGroup]:
    for row, numbers in rows:
        if row["is"] == "attention":
            yield _softmax(reader, row, numbers)
        elif row["is"] == "state":
            yield _recurrent(reader, row, numbers)


def _softmax(reader: _Reader, row: Mapping[str, Any], numbers: Sequence[int]) -> AttentionGroup:
    # A null window is not a window.
    window = reader.size(row["window"]) if reader.term(row["window"]) else None
    kind = "sliding" if window and row["kind"] == "full" else row["kind"]
    head = reader.size(row["head"])
    value = reader.size(row.get("value", "0"))
    return AttentionGroup(
        kind=kind,
        layers=len(numbers),
        numbers=() if row["layers"] in ("all", "once") else tuple(numbers),
        heads=reader.size(row["heads"]),
        kv_heads=reader.size(row["kv_heads"]),
        head_dim=head,
        value_dim=value if value not in (0, head) else None,
        window=window if kind == "sliding" else None,
        has_sinks=bool(reader.term(row["sinks"])),
        alibi=bool(reader.term(row.get("alibi", "0"))),
        causal=kind not in ("encoder", "vision"),
        index_dim=reader.size(row.get("index", "0")) or None,
    )


def _recurrent(reader: _Reader, row: Mapping[str, Any], numbers: Sequence[int]) -> AttentionGroup:
    """The recurrent attention of a row of a structure."""
    names = ("heads", "rows", "columns", "groups")
    heads, rows, columns, groups = (reader.size(row[name]) for name in names)
    # Fields that engines read of any config (get_mamba_chunk_size in vllm/config/model.py).
    chunk = reader.field_value("mamba_chunk_size") or reader.field_value("chunk_size")
    state = Recurrent(
        kind=row["kind"],
        heads=heads,
        rows=rows,
        columns=columns,
        groups=groups,
        conv_channels=reader.size(row["channels"]),
        conv_kernel=reader.size(row["kernel"]),
        dtype=row["dtype"] or None,
        chunk=chunk if type(chunk) is int and row["kind"] == "mamba2" else None,
    )
    return AttentionGroup(
        kind="recurrent",
        layers=len(numbers),
        numbers=tuple(numbers),
        heads=heads,
        kv_heads=groups,
        head_dim=columns,
        value_dim=rows,
        recurrent=state,
    )
