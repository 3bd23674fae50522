"""Kernels and attention backends of layers as rows with notes. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.domain import (
    LayerAttention,
    LayerKernel,
    Refusal,
    RejectedPlan,
)


class LayerTable(NamedTuple):
    """A table of layers with a common prefix, and its numbered notes."""

    prefix: str
    rows: list[tuple[str, ...]]
    notes: list[str]


def kernel_table(kernels: tuple[LayerKernel, ...]) -> LayerTable:
    """The kernel of each layer with its reason; plain matrix products are one row."""
    shown_kernels = [
        layer_kernel
        for layer_kernel in kernels
        if layer_kernel.scheme != "unquantized" or layer_kernel.kernel != "torch"
    ]
    common_path = _common_path([layer_kernel.layer for layer_kernel in shown_kernels])
    display: list[tuple[str, ...]] = []
    notes: list[str] = []
    for layer_kernel in shown_kernels:
        size = (
            f"{layer_kernel.k} x {layer_kernel.n}"
            if layer_kernel.k is not None
            else "cannot be cut"
        )
        texts = [_SUFFIX.sub("", layer_kernel.reason)] if layer_kernel.reason else []
        texts += (
            [f"{'it would crash: ' if layer_kernel.status == 'crash' else ''}{layer_kernel.note}"]
            if layer_kernel.note
            else []
        )
        texts += (
            [f"padded to {layer_kernel.padded_to[0]} x {layer_kernel.padded_to[1]}"]
            if layer_kernel.padded_to
            else []
        )
        kernel = _short_name(layer_kernel.kernel or _STATUS[layer_kernel.status])
        kernel += _reference_to_note(texts + refusal_lines(layer_kernel.refusals), notes)
        display.append(
            (
                f"{layer_kernel.layer.removeprefix(f'{common_path}.')} x{layer_kernel.count}",
                size,
                layer_kernel.scheme,
                kernel,
            )
        )
    plain_reason = next(
        (layer_kernel.reason for layer_kernel in kernels if layer_kernel not in shown_kernels), ""
    )
    if plain_count := sum(layer_kernel.count for layer_kernel in kernels) - sum(
        layer_kernel.count for layer_kernel in shown_kernels
    ):
        display.append(
            (
                f"{plain_count} other layers" if display else f"all {plain_count} layers",
                "",
                "unquantized",
                f"torch{_reference_to_note([plain_reason], notes)}",
            )
        )
    return LayerTable(common_path, display, notes)


_STATUS = {"ok": "", "none": "NONE", "unknown": "unknown", "crash": ""}


def attention_table(attention: tuple[LayerAttention, ...]) -> LayerTable:
    """The backend of each kind of attention layers, with its reason and the passed-over ones."""
    notes: list[str] = []
    display: list[tuple[str, ...]] = []
    for layer_attention in attention:
        texts = [layer_attention.reason] if layer_attention.reason else []
        texts += refusal_lines(layer_attention.refusals)
        cell = f"{_backend_name(layer_attention)}{_reference_to_note(texts, notes)}"
        display.append(
            (
                f"{layer_attention.kind} x{layer_attention.layers}",
                str(layer_attention.head_dim),
                cell,
            )
        )
    return LayerTable("", display, notes)


def kernel_words(kernels: tuple[LayerKernel, ...], attention: tuple[LayerAttention, ...]) -> str:
    """`Kernels: Marlin x240, torch x91. Attention: FLASH_ATTN 2 x36.`: layers by kernel; "" without
    any."""
    groups = {
        "Kernels": [
            (_short_name(layer_kernel.kernel or _STATUS[layer_kernel.status]), layer_kernel.count)
            for layer_kernel in kernels
        ],
        "Attention": [
            (_backend_name(layer_attention), layer_attention.layers)
            for layer_attention in attention
        ],
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


def _backend_name(layer_attention: LayerAttention) -> str:
    return (
        f"{layer_attention.backend} {layer_attention.version or ''}".strip()
        if layer_attention.backend
        else _STATUS[layer_attention.status]
    )


def rejection_lines(rejection: RejectedPlan) -> list[str]:
    """A line for each kernel or backend of a layer that all of them refuse; else no line."""
    refusals = [
        layer_kernel.refusals
        for layer_kernel in rejection.kernels
        if layer_kernel.status == "none" and layer_kernel.layer == rejection.layer
    ]
    refusals += [
        layer_attention.refusals
        for layer_attention in rejection.attention
        if layer_attention.status == "none"
    ]
    has_list = bool(refusals) and rejection.verdict in ("no_kernel", "no_backend")
    return refusal_lines(refusals[0]) if has_list else []


def refusal_lines(refusals: tuple[Refusal, ...]) -> list[str]:
    """`Machete, CutlassW4A8: why`, one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for refusal in refusals:
        reasons.setdefault(refusal.reason, []).append(_short_name(refusal.kernel))
    return [f"{', '.join(names)}: {reason}".removeprefix(": ") for reason, names in reasons.items()]


def _reference_to_note(texts: list[str], notes: list[str]) -> str:
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
