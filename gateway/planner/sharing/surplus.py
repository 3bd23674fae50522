"""KV cache that a model offers to other models, and the cap that it has afterwards. Pure.

surplus_offers(plan, wish, replica)      offers: beyond its need, then beyond its wish
partial_offer(offer, count)              the same offer with fewer bytes
cap_after_giving(offer, plan, models)    the cap of the model that gives it
current_cap(attempts, caps)              the cap of a model now
last_cap(attempts)                       the cap of a copy's last plan
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from gateway.diagnosis.ending import is_environmental
from gateway.domain import Attempt, Cap, Offer, Plan, Wish
from gateway.domain.units import MIB, gib
from gateway.engines.common.speed.objective import LONG_REQUESTS_MAX, concurrency
from gateway.planner.flags import MEMORY_FLAGS
from gateway.planner.sizes import COMFORTABLE_CONTEXT, UNCERTAINTY_PARTS

# An offer below 512 MiB, or below a 25th of the GPU's memory, is not worth a restart.
_MIN_OFFER_BYTES = 512 * MIB
_MIN_SHARE = 25
# An engine's share of a GPU is in hundredths.
_STEP = 100


def surplus_offers(plan: Plan, wish: Wish, replica: int = 0) -> tuple[Offer, ...]:
    """The offers of KV cache, smallest first.

    At least one whole context stays, and enough for the wished number of requests. No offers if the
    user set the size or pinned the model: giving means a restart.
    """
    memory = plan.memory
    flags = {name.replace("_", "-") for name in wish.args}
    if (
        wish.policy.pinned
        or not plan.gpus
        or not memory.kv_tokens
        or not memory.kv_bytes
        or not flags.isdisjoint(MEMORY_FLAGS)
    ):
        return ()
    context = plan.max_model_len.value
    if wish.goal != "context" and "max-model-len" not in flags and "context-length" not in flags:
        context = min(context, wish.context or wish.min_context or COMFORTABLE_CONTEXT)
    offers: list[Offer] = []
    for at_once in sorted(
        {min(LONG_REQUESTS_MAX, concurrency(wish)), min(LONG_REQUESTS_MAX, wish.concurrency or 1)},
        reverse=True,
    ):
        tokens = context * at_once
        # The next plan of the giver reserves this for errors of its estimates and for rounding.
        spare_bytes = (
            memory.budget_bytes - memory.kv_bytes
        ) // UNCERTAINTY_PARTS + memory.gpu_bytes // _STEP * 2
        offered_bytes = (
            memory.kv_bytes - math.ceil(memory.kv_bytes * tokens / memory.kv_tokens) - spare_bytes
        )
        if offered_bytes < max(_MIN_OFFER_BYTES, memory.gpu_bytes // _MIN_SHARE):
            continue
        offer = Offer(
            model=wish.name,
            kind="surplus",
            bytes_by_gpu=dict.fromkeys(plan.gpus, offered_bytes),
            replica=replica,
            keeps=memory.promised_bytes - offered_bytes,
            tokens=math.floor(
                (memory.kv_bytes - offered_bytes - memory.gpu_bytes // _STEP)
                * memory.kv_tokens
                / memory.kv_bytes
            ),
            cache_tokens_before=memory.kv_tokens,
            cache_bytes_before=memory.kv_bytes,
            context=context,
            words="",
        )
        offers.append(offer.evolve(words=_offer_text(offer)))
    return tuple(offers)


def partial_offer(offer: Offer, count: int) -> Offer:
    """The offer of `count` bytes of each GPU instead of all."""
    offered_bytes = max(offer.bytes_by_gpu.values())
    if offer.kind != "surplus" or count >= offered_bytes:
        return offer
    smaller = offer.evolve(
        bytes_by_gpu=dict.fromkeys(offer.bytes_by_gpu, count),
        keeps=offer.keeps + offered_bytes - count,
        tokens=offer.tokens
        + (offered_bytes - count) * offer.cache_tokens_before // offer.cache_bytes_before,
    )
    return smaller.evolve(words=_offer_text(smaller))


def cap_after_giving(offer: Offer, plan: Plan, models: Iterable[str]) -> Cap:
    """The cap of the model once it gave the offer, for the sake of `models`.

    Half a step less than its bytes: budgets are rounded to the nearest step.
    """
    return Cap(
        bytes=offer.keeps - plan.memory.gpu_bytes // _STEP // 2, models=tuple(sorted(set(models)))
    )


def _offer_text(offer: Offer) -> str:
    remaining_text, total = (
        f"{tokens / offer.context:.1f}".removesuffix(".0")
        for tokens in (offer.tokens, offer.cache_tokens_before)
    )
    return (
        f"{offer.model}{f' (copy {offer.replica + 1})' if offer.replica else ''} gives"
        f" {gib(max(offer.bytes_by_gpu.values()))} of KV cache, room for {remaining_text} of"
        f" {total}"
        f" requests of {offer.context:,} tokens stays"
    )


def current_cap(attempts: Iterable[Attempt], caps: Mapping[str, Collection[Cap]]) -> Cap | None:
    """The cap of a model. It holds until the models that it was made for are gone or a start fails.

    Usually this is the cap of the last capped plan. If other models have accepted caps for this
    model since it last served, its cap is the memory that it took then.

    attempts: the attempts of the model for its present wish, oldest first.
    caps: the last cap of each copy of every other model.
    """
    capped_attempt = None
    served_attempt = None
    name = ""
    for attempt in attempts:
        name = attempt.model
        capped_attempt = attempt if attempt.plan.cap is not None else capped_attempt
        if attempt.ready_at is not None:
            served_attempt = attempt
        elif _is_failed_start(attempt):
            served_attempt = None
    if (
        capped_attempt is not None
        and capped_attempt.plan.cap is not None
        and set(capped_attempt.plan.cap.models) & caps.keys()
    ):
        return capped_attempt.plan.cap if not _is_failed_start(capped_attempt) else None
    capped_for_it = tuple(
        sorted(
            model
            for model, model_caps in caps.items()
            if any(name in cap.models for cap in model_caps)
        )
    )
    return (
        Cap(bytes=served_attempt.plan.memory.promised_bytes, models=capped_for_it)
        if served_attempt is not None and capped_for_it
        else None
    )


def last_cap(attempts: Sequence[Attempt]) -> Cap | None:
    """The cap of the last plan that has one. attempts: of one copy, oldest first."""
    caps = (attempt.plan.cap for attempt in reversed(attempts))
    return next((cap for cap in caps if cap is not None), None)


def _is_failed_start(attempt: Attempt) -> bool:
    return (
        attempt.failure is not None
        and attempt.ready_at is None
        and not is_environmental(attempt.failure)
    )
