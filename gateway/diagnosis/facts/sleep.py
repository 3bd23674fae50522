"""Facts about sleep: whether an engine version frees its memory and wakes up again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway.domain import Fact, Plan
from gateway.domain.units import gib

# Only for types: a plan does without the classes of running engines.
if TYPE_CHECKING:
    from gateway.domain import Attempt

# The share of the expected memory that a sleep must free.
_MIN_SHARE = 0.8


def sleep_scope(scope: Mapping[str, str]) -> dict[str, str]:
    """The part of a plan's scope in which facts about sleep hold."""
    return {key: scope[key] for key in ("engine", "device") if key in scope}


def expected_bytes(plan: Plan) -> int:
    """The bytes of each GPU that a sleep should free: weights and KV cache."""
    return plan.memory.weights_bytes + plan.memory.kv_bytes


def has_freed_enough(plan: Plan, freed_bytes: Mapping[str, int]) -> bool:
    """Whether a sleep freed its memory. freed_bytes: bytes by the UUID of a GPU."""
    return bool(freed_bytes) and min(freed_bytes.values()) >= _MIN_SHARE * expected_bytes(plan)


def result_fact(attempt: Attempt, freed_bytes: Mapping[str, int], now_s: float) -> Fact:
    """The fact of a sleep by the freed memory."""
    plan = attempt.plan
    source = (
        f"{plan.engine} freed {gib(min(freed_bytes.values(), default=0))} of each GPU when it fell"
        f" asleep, and {gib(expected_bytes(plan))} were expected"
    )
    return _sleep_fact(attempt, source, now_s, is_working=has_freed_enough(plan, freed_bytes))


def failure_fact(attempt: Attempt, reason: str, now_s: float) -> Fact:
    """The fact of a failed sleep. reason: a predicate, as "did not wake up"."""
    return _sleep_fact(attempt, f"{attempt.plan.engine} {reason}", now_s, is_working=False)


def _sleep_fact(attempt: Attempt, source: str, now_s: float, *, is_working: bool) -> Fact:
    return Fact(
        kind="sleep_works" if is_working else "sleep_fails",
        scope=sleep_scope(attempt.plan.scope),
        grade="verified" if is_working else "failed",
        software=attempt.plan.software,
        source=source,
        attempt=attempt.id,
        at=now_s,
    )
