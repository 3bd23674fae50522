"""Measurements of this machine's GPUs (`fitserve calibrate`), read from facts. Pure.

measured = MachineMeasurements(facts)
measured.number(gpu, quantity)      of one GPU; None: it was not measured
measured.all_reduce(gpus, links)    of GPUs together, or of others of the machine that are like them
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from gateway.domain import Fact, Gpu, Link
from gateway.domain.record import FrozenRecord
from gateway.domain.units import day_text

# All values of facts are whole numbers: bytes/s, FLOP/s, nanoseconds.
_NANO = 1e9


class Number(FrozenRecord, frozen=True):
    """A measured number in bytes/s, FLOP/s or seconds. day: as 2026-11-22."""

    value: float
    day: str


class AllReduceFit(FrozenRecord, frozen=True):
    """An all-reduce of `size` bytes takes latency_s + 2 (n - 1) / n x size / bytes_s."""

    latency_s: float
    bytes_s: float
    day: str


class MachineMeasurements:
    """The measurements of a machine. Of repeated ones, the last counts."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._numbers: dict[tuple[str, str], Number] = {}
        self._reduces: dict[tuple[str, str], dict[str, dict[int, Number]]] = {}
        for fact in facts:
            if fact.kind != "machine_speed" or not fact.value:
                continue
            scope = fact.scope
            day = day_text(fact.at)
            quantity = scope.get("what", "")
            gpus = scope.get("gpus", "")
            if quantity == "all_reduce":
                sizes = self._reduces.setdefault(
                    (scope.get("cards", ""), scope.get("links", "")), {}
                ).setdefault(gpus, {})
                sizes[int(scope.get("bytes", "0"))] = Number(fact.value / _NANO, day)
            else:
                self._numbers[quantity, gpus] = Number(
                    fact.value / _NANO if quantity in SECONDS else float(fact.value), day
                )

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._numbers or self._reduces)

    def number(self, gpu: Gpu, quantity: str) -> Number | None:
        return self._numbers.get((quantity, gpu.uuid))

    def all_reduce(
        self, gpus: Sequence[Gpu], links: Mapping[frozenset[int], Link]
    ) -> AllReduceFit | None:
        same_group = (
            self._reduces.get((cards(gpus), link_class(gpus, links))) if self._reduces else None
        )
        if same_group is None:
            return None
        sizes = same_group.get(uuids(gpus)) or next(
            (item for names, item in same_group.items() if names.count(",") == len(gpus) - 1), None
        )
        return None if sizes is None or len(sizes) < 2 else fit_reduce(sizes, len(gpus))


SECONDS = ("all_reduce", "launch", "peer_latency")
"""Quantities in seconds; all others are in bytes/s or FLOP/s."""


def fit_reduce(sizes: Mapping[int, Number], count: int) -> AllReduceFit | None:
    """The smallest size gives the latency, and the others give bytes/s with equal weight."""
    (_, first), *larger = sorted(sizes.items())
    moved_rates = [
        2 * (count - 1) / count * size / (item.value - first.value)
        for size, item in larger
        if item.value > first.value
    ]
    if not moved_rates:
        return None
    return AllReduceFit(
        first.value, math.exp(sum(map(math.log, moved_rates)) / len(moved_rates)), first.day
    )


def uuids(gpus: Iterable[Gpu]) -> str:
    return ",".join(sorted(gpu.uuid for gpu in gpus))


def cards(gpus: Iterable[Gpu]) -> str:
    return ", ".join(sorted(gpu.name for gpu in gpus))


def link_class(gpus: Sequence[Gpu], links: Mapping[frozenset[int], Link]) -> str:
    """The connection between GPUs, as far as it determines their bandwidth."""
    return " + ".join(
        sorted(
            {
                _connection_name(a, b, links.get(frozenset((a.index, b.index))))
                for a, b in combinations(gpus, 2)
            }
        )
    )


def _connection_name(a: Gpu, b: Gpu, link: Link | None) -> str:
    if link is not None and link.nvlinks:
        return f"{link.nvlinks} NVLinks"
    lanes = min((gpu.pcie.max_generation or 0, gpu.pcie.max_width or 0) for gpu in (a, b))
    return f"PCIe {lanes[0]} x{lanes[1]}{' with P2P' if link is not None and link.p2p else ''}"
