"""Which of several plans is worth most, for what it is wanted for. Pure.

worth(outcome, goal, share) -> a number; of two plans the larger is better
in_order(plans, value, ties) -> best first
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.domain import Speed, Wish
from gateway.domain.wish import Goal

T = TypeVar("T")

# Twice as many GPUs have to give so much more, where nobody else needs them: 2 ** 0.15 is a ninth.
ALONE = 0.15
# Beside other models a plan is as good as what each of its GPUs gives.
SHARED = 1.0
# Plans whose worth differs by less are alike: what else is known of them decides. The estimate tells them apart no better.
ALIKE = 0.1
# What counts how much where a model is wanted for all: answers of one user, of many, and room for their contexts.
_BALANCE = (0.4, 0.4, 0.2)


@dataclass(frozen=True)
class Outcome:
    """What a plan gives, with all its copies. kept: tokens of context that have room at once, as far as somebody needs them."""

    speed: Speed | None
    context: int
    kept: int
    gpus: int


# Requests at once where nobody said how many.
_CONCURRENCY: dict[Goal, int] = {"latency": 1, "balanced": 32, "context": 4, "throughput": 256}


def concurrency(wish: Wish) -> int:
    """Requests at once that a plan is made for."""
    return wish.concurrency or _CONCURRENCY[wish.goal]


def share(gpus: object) -> float:
    """By how much a plan's worth falls with the GPUs that it takes, by what a wish says of them: None, few, or how many or which."""
    if gpus is None:
        return ALONE
    return SHARED if gpus == "few" else 0.0


def worth(outcome: Outcome, goal: Goal, cost: float) -> float:
    """cost: what `share` says. Worth falls with that power of the GPUs that a plan takes."""
    gpus, speed = max(1, outcome.gpus), outcome.speed
    if goal == "context":
        return outcome.context / math.pow(gpus, cost)
    if speed is None:
        # Where nothing is known of the GPUs, few of them are better than many.
        return 1 / math.pow(gpus, SHARED)
    stream, total = speed.stream.value, speed.total.value
    if goal == "balanced":
        gains = (stream, total, max(1, outcome.kept))
        gain = math.exp(sum(part * math.log(one) for part, one in zip(_BALANCE, gains, strict=True)))
    else:
        gain = stream if goal == "latency" else total
    return gain / math.pow(gpus, cost)


def in_order(items: Sequence[T], value: Callable[[T], float], ties: Callable[[T], Any]) -> list[T]:
    """Best first. Of those that are alike to the best of what is left, the first by `ties` comes next."""
    values = {id(one): value(one) for one in items}
    left, ordered = sorted(items, key=lambda one: -values[id(one)]), []
    while left:
        near = [one for one in left if values[id(one)] >= values[id(left[0])] * (1 - ALIKE)]
        chosen = min(near, key=ties)
        ordered.append(chosen)
        left.remove(chosen)
    return ordered
