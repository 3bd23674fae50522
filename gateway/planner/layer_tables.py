"""Kernels and attention backends of layers as rows with notes. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.domain import (
    LayerAttention,
    LayerKernel,
    Refusal,
)


class LayerTable(NamedTuple):
    """A table of layers with a common prefix, and its numbered notes."""

    prefix: str
    rows: list[tuple[str, ...]]
    notes: list[str]


def kernel_table(rows: tuple[LayerKernel, ...]) -> LayerTable:
    """The kernel of each layer with its reason; plain matrix products are one row."""
    shown_rows = [row for row in rows if row.scheme != "unquantized" or row.kernel != "torch"]
    common_path = _common_path([row.layer for row in shown_rows])
    display: list[tuple[str, ...]] = []
    notes: list[str] = []
    for row in shown_rows:
        size = f"{row.k} x {row.n}" if row.k is not None else "cannot be cut"
        texts = [_SUFFIX.sub("", row.reason)] if row.reason else []
        texts += (
            [f"{'it would crash: ' if row.status == 'crash' else ''}{row.note}"] if row.note else []
        )
        texts += [f"padded to {row.padded_to[0]} x {row.padded_to[1]}"] if row.padded_to else []
        kernel = _short_name(row.kernel or _STATUS[row.status])
        kernel += _note_reference(texts + passed_over(row.refused), notes)
        display.append(
            (f"{row.layer.removeprefix(f'{common_path}.')} x{row.count}", size, row.scheme, kernel)
        )
    plain_reason = next((row.reason for row in rows if row not in shown_rows), "")
    if plain_count := sum(row.count for row in rows) - sum(row.count for row in shown_rows):
        display.append(
            (
                f"{plain_count} other layers" if display else f"all {plain_count} layers",
                "",
                "unquantized",
                f"torch{_note_reference([plain_reason], notes)}",
            )
        )
    return LayerTable(common_path, display, notes)


_STATUS = {"ok": "", "none": "NONE", "unknown": "unknown", "crash": ""}


def attention_table(rows: tuple[LayerAttention, ...]) -> LayerTable:
    """The backend of each kind of attention layers, with its reason and the passed-over ones."""
    notes: list[str] = []
    display: list[tuple[str, ...]] = []
    for row in rows:
        texts = [row.reason] if row.reason else []
        cell = f"{_backend_name(row)}{_note_reference(texts + passed_over(row.refused), notes)}"
        display.append((f"{row.kind} x{row.layers}", str(row.head_dim), cell))
    return LayerTable("", display, notes)


def kernel_words(kernels: tuple[LayerKernel, ...], attention: tuple[LayerAttention, ...]) -> str:
    """`Kernels: Marlin x240, torch x91. Attention: FLASH_ATTN 2 x36.`: layers by kernel; "" without
    any."""
    groups = {
        "Kernels": [(_short_name(row.kernel or _STATUS[row.status]), row.count) for row in kernels],
        "Attention": [(_backend_name(row), row.layers) for row in attention],
    }
    sentences = []
    for title, pairs in groups.items():
        counts: dict[str, int] = {}
        for name, count in pairs:
            counts[name] = counts.get(name, 0) + count
        if counts:
            names = ", ".join(f"{name} x{count}" for name, count in counts.items())
            sentences.append(f"{title}: {names}.")
    return " ".join(sentences)


def _backend_name(row: LayerAttention) -> str:
    return f"{row.backend} {row.version or ''}".strip() if row.backend else _STATUS[row.status]


def passed_over(refusals: tuple[Refusal, ...]) -> list[str]:
    """`Machete, CutlassW4A8: why`, one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for refusal in refusals:
        reasons.setdefault(refusal.reason, []).append(_short_name(refusal.kernel))
    return [f"{', '.join(names)}: {reason}".removeprefix(": ") for reason, names in reasons.items()]


def _note_reference(texts: list[str], notes: list[str]) -> str:
    """A reference to the note that says this, which is added where there is none yet."""
    note = "; ".join(texts)
    if not note:
        return ""
    if note not in notes:
        notes.append(note)
    return f" ({notes.index(note) + 1})"


def _short_name(kernel: str) -> str:
    return _SUFFIX.sub("", kernel)


_SUFFIX = re.compile(r"(LinearKernel|MoEMethod)\b")


def _common_path(names: list[str]) -> str:
    """The path that all these names begin with: `model.layers.*.`"""
    paths = [name.split(".")[:-1] for name in names]
    common_parts = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common_parts.append(parts[0])
    return ".".join(common_parts)
