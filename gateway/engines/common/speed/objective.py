"""Score of plans for a goal. Pure.

score(outcome, goal, cost) -> a number; of two plans the larger is better
rating(worth, demerits) -> the same, with the drawbacks of the plan
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gateway.domain import Memory, Speed, Wish
from gateway.domain.wish import Goal

# The knee: while nobody asked for all GPUs, twice as many have to give a quarter more.
KNEE = math.log2(1.25)
# The same for throughput, which asks for the machine's whole speed: 2 ** 0.15 is a ninth.
_KNEE_OF_THROUGHPUT = 0.15
# A plan that shares the machine with other models is judged by the work of each of its GPUs.
SHARED_GPU_DISCOUNT = 1.0
# Reduction of a plan's score by each penalty. Differences below a tenth are within the error of the
# estimate.
_WEAK = 0.1
_CHANGE = 0.03
_OLDER = 0.02
_OLDEST = 0.1
# Copies: requests are never divided quite evenly, and each copy computes and keeps the prefixes
# that requests share by itself.
_COPIES = 0.02
# Weights for a balanced goal: speed for one user, throughput of many, and room for their contexts.
_BALANCE = (0.4, 0.4, 0.2)


class PlanOutcome(NamedTuple):
    """Results of a plan with all its replicas. useful_tokens: tokens of context that fit together,
    up to the needed number."""

    speed: Speed | None
    context: int
    useful_tokens: int
    gpus: int


def plan_outcome(
    memory: Memory,
    speed: Speed | None,
    context: int,
    gpus: int,
    count: int,
    tokens_needed: int,
    groups: int = 1,
) -> PlanOutcome:
    """Results of `count` replicas of a plan.

    gpus: the number of GPUs of one replica.
    tokens_needed: useful tokens of KV cache; more do not count.
    groups: the number of groups of ranks in a replica; each has a KV cache.
    """
    held_tokens = memory.kv_tokens * count * groups
    kept_tokens = min(held_tokens, tokens_needed) if memory.kv_bytes_per_token else tokens_needed
    return PlanOutcome(speed, context, kept_tokens, gpus * count)


# Requests that have their whole context at the same time.
LONG_REQUESTS_MAX = 4
# Concurrent requests where the wish names no number.
_CONCURRENCY: dict[Goal, int] = {
    "latency": 1,
    "balanced": 32,
    "agents": 32,
    "context": 4,
    "throughput": 256,
}


def concurrency(wish: Wish) -> int:
    """Concurrent requests that a plan is made for."""
    return wish.concurrency or _CONCURRENCY[wish.goal]


def gpu_discount(wish: Wish) -> float:
    """Discount of a plan's score for each GPU, by the GPUs that the user asks for: None, few, or a
    number or a list. Copies that follow the load leave GPUs to one another."""
    if wish.gpus is None and wish.copies is None:
        return _KNEE_OF_THROUGHPUT if wish.goal == "throughput" else KNEE
    return SHARED_GPU_DISCOUNT if wish.gpus in ("few", None) else 0.0


def score(outcome: PlanOutcome, goal: Goal, cost: float) -> float:
    """cost: the result of `gpu_discount`. Worth falls with that power of the GPUs that a plan
    takes."""
    gpus = max(1, outcome.gpus)
    speed = outcome.speed
    if goal == "context":
        return outcome.context / math.pow(gpus, cost)
    if speed is None:
        # Where nothing is known of the GPUs, few of them are better than many.
        return 1 / math.pow(gpus, SHARED_GPU_DISCOUNT)
    stream = speed.stream.value
    total = speed.total.value
    if goal in ("balanced", "agents"):
        gains = (stream, total, max(1, outcome.useful_tokens))
        gain = math.exp(
            sum(part * math.log(gain) for part, gain in zip(_BALANCE, gains, strict=True))
        )
    else:
        gain = stream if goal == "latency" else total
    return gain / math.pow(gpus, cost)


class Penalties(NamedTuple):
    """Arguments against a plan other than its speed.

    is_weak: the engine version has published weaknesses.
    changes: number of changes of the engine's own choices.
    older: position of the engine version after the newest.
    has_copies: several engines serve it.
    """

    is_weak: bool
    changes: int
    older: int
    has_copies: bool = False


def rating(worth: float, demerits: Penalties) -> float:
    """Each plan is rated by itself, so that which of two comes first never depends on a third."""
    lost_share = (
        _WEAK * demerits.is_weak
        + _CHANGE * demerits.changes
        + min(_OLDER * demerits.older, _OLDEST)
    )
    lost_share += _COPIES * demerits.has_copies
    return math.log(max(worth, 1e-9)) - lost_share
