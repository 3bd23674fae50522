"""What of its KV cache a model could give to others, and for how long it does without. Pure.

surplus(plan, wish, replica) -> offers: first what is beyond its need, then all but what its wish
asks for part(offer, bytes) -> the same offer, of so much
without(offer, plan, models) -> the cap of the model that gives it
kept(attempts, others) -> the cap that the model keeps to
last_cap(attempts) -> the cap that a copy had last
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from gateway.diagnosis.ending import environmental
from gateway.domain import Attempt, Cap, Offer, Plan, Wish
from gateway.domain.units import MIB, gib
from gateway.engines.common.speed.objective import LONG_AT_ONCE, concurrency
from gateway.planner.sizes import COMFORTABLE_CONTEXT, UNSURE

# Less than this, or than such a part of a GPU, is not worth a restart.
_LEAST, _LEAST_SHARE = 512 * MIB, 25
# An engine's share of a GPU is told in hundredths.
_STEP = 100


def surplus(plan: Plan, wish: Wish, replica: int = 0) -> tuple[Offer, ...]:
    """Smallest first. Never less than one whole context stays, of the length that was wished for or
    that is of use, nor less than the wished
    requests at once need. Nothing where the user set the size, or pinned the model: to give is to
    be started anew.
    """
    memory, own = plan.memory, {name.replace("_", "-") for name in wish.args}
    if (
        wish.policy.pinned
        or not plan.gpus
        or not memory.kv_tokens
        or not memory.kv_bytes
        or own & _SIZES
    ):
        return ()
    context = plan.max_model_len.value
    if wish.goal != "context" and "max-model-len" not in own and "context-length" not in own:
        context = min(context, wish.min_context or wish.context or COMFORTABLE_CONTEXT)
    found: list[Offer] = []
    for at_once in sorted(
        {min(LONG_AT_ONCE, concurrency(wish)), min(LONG_AT_ONCE, wish.concurrency or 1)},
        reverse=True,
    ):
        stays = context * at_once
        # Alike to how the planner sizes it anew: the need, what is unsure of the rest, and up to a
        # step of the share more.
        spare = (memory.budget_bytes - memory.kv_bytes) // UNSURE + memory.gpu_bytes // _STEP * 2
        count = memory.kv_bytes - math.ceil(memory.kv_bytes * stays / memory.kv_tokens) - spare
        if count < max(_LEAST, memory.gpu_bytes // _LEAST_SHARE):
            continue
        offer = Offer(
            model=wish.name,
            how="surplus",
            gives=dict.fromkeys(plan.gpus, count),
            replica=replica,
            keeps=memory.promised_bytes - count,
            tokens=math.floor(
                (memory.kv_bytes - count - memory.gpu_bytes // _STEP)
                * memory.kv_tokens
                / memory.kv_bytes
            ),
            of_tokens=memory.kv_tokens,
            of_bytes=memory.kv_bytes,
            context=context,
            words="",
        )
        found.append(offer.evolve(words=_words(offer)))
    return tuple(found)


def part(offer: Offer, count: int) -> Offer:
    """So many bytes of each GPU instead of all that was offered."""
    most = max(offer.gives.values())
    if offer.how != "surplus" or count >= most:
        return offer
    less = offer.evolve(
        gives=dict.fromkeys(offer.gives, count),
        keeps=offer.keeps + most - count,
        tokens=offer.tokens + (most - count) * offer.of_tokens // offer.of_bytes,
    )
    return less.evolve(words=_words(less))


def without(offer: Offer, plan: Plan, models: Iterable[str]) -> Cap:
    """What the model keeps to once it gave the offer. Its budget is rounded to the nearest step,
    and is to be no more than what is left."""
    return Cap(
        bytes=offer.keeps - plan.memory.gpu_bytes // _STEP // 2, models=tuple(sorted(set(models)))
    )


def _words(offer: Offer) -> str:
    stays, there = (
        f"{tokens / offer.context:.1f}".removesuffix(".0")
        for tokens in (offer.tokens, offer.of_tokens)
    )
    return (
        f"{offer.model}{f' (copy {offer.replica + 1})' if offer.replica else ''} gives"
        f" {gib(max(offer.gives.values()))} of KV cache, room for {stays} of {there} requests of"
        f" {offer.context:,} tokens stays"
    )


# Flags that say how much an engine takes.
_SIZES = {
    "gpu-memory-utilization",
    "mem-fraction-static",
    "kv-cache-memory-bytes",
    "max-total-tokens",
}


def kept(attempts: Iterable[Attempt], others: Mapping[str, Collection[Cap]]) -> Cap | None:
    """What the model keeps to, until none of the models is left that share its GPUs, or until a
    start with it failed by itself: the cap of its last
    plan that has one, or what it took when it last served, where others came beside that and keep
    to theirs for its sake.

    attempts: of the model by its present wish, oldest first. others: all other models, and the last
    caps of the copies of each.
    """
    capped, served, name = None, None, ""
    for attempt in attempts:
        name = attempt.model
        capped = attempt if attempt.plan.cap is not None else capped
        served = attempt if attempt.ready_at is not None else None if _failed(attempt) else served
    if (
        capped is not None
        and capped.plan.cap is not None
        and set(capped.plan.cap.models) & others.keys()
    ):
        return capped.plan.cap if not _failed(capped) else None
    beside = tuple(
        sorted(other for other, caps in others.items() if any(name in cap.models for cap in caps))
    )
    return (
        Cap(bytes=served.plan.memory.promised_bytes, models=beside)
        if served is not None and beside
        else None
    )


def last_cap(attempts: Sequence[Attempt]) -> Cap | None:
    """Of the last plan of a copy that has one; oldest first."""
    return next((one.plan.cap for one in reversed(attempts) if one.plan.cap is not None), None)


def _failed(attempt: Attempt) -> bool:
    return (
        attempt.failure is not None
        and attempt.ready_at is None
        and not environmental(attempt.failure)
    )
