"""How fast a plan will be: its work on its GPUs, as one number for each thing that a user feels. Pure.

expected(load, clock) -> Speed
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.core.speed.step import Clock
from gateway.domain import Estimate, Speed

# Tokens that a request of the many reads and writes: a chat with some history, an agent's step.
READ, WRITTEN = 1024, 256
_SHORT, _LONG = 2048, 32768


@dataclass(frozen=True)
class Load:
    """What is asked of a plan. concurrency: requests at once, over all `replicas`. seqs, tokens: the most of one step of a replica.
    kv_tokens: of its cache; 0: nothing grows. context: the longest request."""

    concurrency: int
    replicas: int
    seqs: int
    tokens: int
    kv_tokens: int
    context: int


def expected(load: Load, clock: Clock) -> Speed:
    most, band = load.tokens, clock.table.band
    read = min(READ, load.context * READ // (READ + WRITTEN))
    written = max(1, min(WRITTEN, load.context - read))
    held = load.kv_tokens // (read + written) if load.kv_tokens else load.seqs
    at_once = max(1, min(math.ceil(load.concurrency / load.replicas), load.seqs, held))
    used = min(load.replicas, load.concurrency)
    total = used * clock.total_per_s(at_once, read, written, most)
    return Speed(
        stream=_banded(1 / clock.decode_s(1, _SHORT), band),
        total=_banded(total, band),
        concurrency=min(load.concurrency, at_once * used),
        first_token_2k_s=_banded(clock.first_token_s(min(_SHORT, load.context), most), band),
        first_token_32k_s=_banded(clock.first_token_s(_LONG, most), band) if load.context >= _LONG else None,
        source=clock.machine.source,
    )


def _banded(value: float, band: float) -> Estimate:
    """Three digits, and the band around them."""
    return Estimate(value=_rounded(value), low=_rounded(value / (1 + band)), high=_rounded(value * (1 + band)))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
