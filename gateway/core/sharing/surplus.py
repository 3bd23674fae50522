"""What of its KV cache a model could give to others, and for how long it does without. Pure.

surplus(plan, wish) -> offers: first what is beyond its need, then all but what its wish asks for
kept(attempts, others) -> the cap that the model keeps to
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from gateway.core.failures.diagnose import environmental
from gateway.core.planner.sizes import COMFORTABLE_CONTEXT, UNSURE
from gateway.core.speed.objective import LONG_AT_ONCE, concurrency
from gateway.domain import Attempt, Cap, Offer, Plan, Wish
from gateway.domain.units import MIB, gib

# Less than this, or than such a part of a GPU, is not worth a restart.
_LEAST, _LEAST_SHARE = 512 * MIB, 25
# An engine's share of a GPU is told in hundredths.
_STEP = 100


def surplus(plan: Plan, wish: Wish) -> tuple[Offer, ...]:
    """Smallest first. Never less than one whole context stays, of the length that was wished for or that is of use, nor less than the wished
    requests at once need. Nothing where the user set the size, or pinned the model: to give is to be started anew."""
    memory, own = plan.memory, {name.replace("_", "-") for name in wish.args}
    if wish.policy.pinned or not plan.gpus or not memory.kv_tokens or not memory.kv_bytes or own & _SIZES:
        return ()
    context = plan.max_model_len.value
    if wish.goal != "context" and "max-model-len" not in own and "context-length" not in own:
        context = min(context, wish.min_context or wish.context or COMFORTABLE_CONTEXT)
    found: list[Offer] = []
    for at_once in sorted({min(LONG_AT_ONCE, concurrency(wish)), min(LONG_AT_ONCE, wish.concurrency or 1)}, reverse=True):
        stays = context * at_once
        # Alike to how the planner sizes it anew: the need, what is unsure of the rest, and up to a step of the share more.
        spare = (memory.budget_bytes - memory.kv_bytes) // UNSURE + memory.gpu_bytes // _STEP
        count = memory.kv_bytes - math.ceil(memory.kv_bytes * stays / memory.kv_tokens) - spare
        if count < max(_LEAST, memory.gpu_bytes // _LEAST_SHARE):
            continue
        words = (
            f"{wish.name} gives {gib(count)} of KV cache, room for {at_once} of {memory.kv_tokens / context:.1f} requests of "
            f"{context:,} tokens stays"
        )
        gives = dict.fromkeys(plan.gpus, count)
        found.append(Offer(model=wish.name, how="surplus", gives=gives, tokens=stays, words=words))
    return tuple(found)


# Flags that say how much an engine takes.
_SIZES = {"gpu-memory-utilization", "mem-fraction-static", "kv-cache-memory-bytes", "max-total-tokens"}


def kept(attempts: Iterable[Attempt], others: Collection[str]) -> Cap | None:
    """The cap of the last plan that has one, until none of the models is left that got the rest, or until a start with it failed by
    itself. attempts: of the model, oldest first. others: the names of all other models."""
    last = None
    for attempt in attempts:
        if attempt.plan.cap is not None:
            last = attempt
    if last is None or last.plan.cap is None:
        return None
    failed = last.failure is not None and last.ready_at is None and not environmental(last.failure)
    return None if failed or not set(last.plan.cap.models) & set(others) else last.plan.cap
