"""Quantiles of measured seconds."""

from __future__ import annotations


def quantile_s(seconds: list[float], share: float) -> float:
    """The value that `share` of the values are below; 0.0 of an empty list."""
    seconds_in_order = sorted(seconds)
    return (
        seconds_in_order[min(len(seconds_in_order) - 1, int(share * len(seconds_in_order)))]
        if seconds_in_order
        else 0.0
    )
