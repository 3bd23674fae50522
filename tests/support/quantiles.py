"""Quantiles of measured seconds."""

from __future__ import annotations


def quantile_s(seconds: list[float], share: float) -> float:
    """The value that `share` of the values are below; 0.0 of an empty list."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
