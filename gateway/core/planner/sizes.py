"""The sizes of a candidate: batch, memory budget, KV cache, context. Pure.

Candidate -> Batch -> Budget -> Memory -> the largest context that fits: Sizes
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.core.facts.scope import batch_scope, holding
from gateway.core.memory import vllm_memory as mem
from gateway.core.planner.batch import Batch, batch
from gateway.core.planner.budget import GRAPHS_IN_BUDGET, budget, divided
from gateway.core.planner.candidate import Candidate
from gateway.core.planner.refusal import Refused
from gateway.domain import Choice, IntChoice, Memory, Scalar
from gateway.domain.units import MIB, gib

# A context that serves most chats and agents; among plans that all load, one that offers less ranks behind one that
# offers it. Only a preference: `min_context` is the user's hard limit.
COMFORTABLE_CONTEXT = 32768
_LEAST_KV = 16 * MIB
# Two starts of the same plan use memory alike to about so much.
_STEADY = 64 * MIB


@dataclass(frozen=True)
class Sizes:
    """`flags` tell the engine its budget; `scope` is where facts about these sizes hold."""

    batch: Batch
    memory: Memory
    context: Choice[int]
    flags: dict[str, Scalar]
    scope: dict[str, str]
    warnings: tuple[str, ...]


def sizes(candidate: Candidate) -> Sizes:
    """Raises Refused; `candidate.found.memory` then shows what is missing."""
    found, engine = candidate.found, candidate.engine
    size = batch(candidate)
    wanted = min(_limit(candidate), max(COMFORTABLE_CONTEXT, candidate.given.wish.min_context or 0))
    bounds = budget(candidate, size.load, wanted)
    scope = candidate.scope | {"budget": bounds.words}
    estimate = divided(candidate, size.load, bounds.bytes)
    memory = found.memory = _seen(candidate, estimate, size)
    used = _used(candidate, memory, size.load)
    if used > bounds.bytes:
        learned = _used(candidate, estimate, size.load) < used
        needed = "were needed here" if learned else "are needed"
        reason = f"{gib(used)} {needed} beside the KV cache, and {gib(bounds.bytes)} are to be had ({bounds.words})"
        raise Refused("no_memory", reason, "fact" if learned else "memory model")
    # On a CPU never left out: without a size the engine takes nearly all memory, even for a model that keeps no cache.
    flags = {"kv-cache-memory-bytes": max(memory.kv_bytes, _LEAST_KV)} if engine.device == "cpu" else bounds.flags
    context, warnings = _context(candidate, memory.kv_bytes, size.load.batched_tokens, scope)
    if memory.kv_bytes:
        requests = candidate.cache.requests(memory.kv_bytes, context.value, size.load.batched_tokens)
        # The engine's own count: what fits of requests this long, which with windows is less than bytes divided by a token's.
        tokens = round(requests * context.value) if math.isfinite(requests) else memory.kv_tokens
        memory = found.memory = memory.evolve(full_requests=round(requests, 2), kv_tokens=tokens)
    return Sizes(size, memory, context, dict(flags), scope, warnings)


def _used(candidate: Candidate, memory: Memory, load: mem.Workload) -> int:
    """Bytes beside the KV cache, within the budget."""
    used = memory.weights_bytes + memory.activation_bytes + memory.overhead_bytes
    return used + (memory.graph_bytes if GRAPHS_IN_BUDGET in candidate.engine.traits and load.runner == 1 else 0)


def _seen(candidate: Candidate, memory: Memory, size: Batch) -> Memory:
    """What earlier starts showed: more is needed than was estimated, or, of a good start, just how much.

    A good start makes the band narrow, but gives no room back: the plan that worked stays the plan.
    """
    about = candidate.scope | batch_scope(size.tokens.value, size.seqs.value, eager=size.eager.value)
    facts = list(holding(candidate.given.facts, "needs_memory", about))
    if not facts:
        return memory
    estimate, per_token = _used(candidate, memory, size.load), memory.kv_bytes_per_token
    exact = [fact.value or 0 for fact in facts if fact.grade == "verified"]
    used = max(estimate, *(fact.value or 0 for fact in facts))
    kv = max(0, memory.budget_bytes - used) if per_token else 0
    seen: Memory = memory.evolve(
        activation_bytes=max(0, memory.activation_bytes + used - estimate),
        kv_bytes=kv,
        kv_tokens=kv // per_token if per_token else 0,
        low=exact[-1] - _STEADY if exact else memory.low,
        high=exact[-1] + _STEADY if exact else max(used, memory.high),
    )
    return seen


def _limit(candidate: Candidate) -> int:
    longest = candidate.given.spec.max_position
    return min(longest, candidate.given.wish.max_context or longest)


def _context(
    candidate: Candidate, kv_bytes: int, batched: int, scope: Mapping[str, str]
) -> tuple[Choice[int], tuple[str, ...]]:
    """The largest context that fits and is wanted, and a warning where it is not all that the model could do."""
    spec, wish, limit = candidate.given.spec, candidate.given.wish, _limit(candidate)
    fits, source = candidate.cache.largest(kv_bytes, batched, max(limit, spec.max_position)), "memory model"
    for fact in holding(candidate.given.facts, "max_context", scope):
        if fact.value is not None and fact.value < fits:
            fits, source = fact.value, f"fact: {fact.source}"
    if "max-model-len" in candidate.args:
        asked = int(candidate.args["max-model-len"])
        if asked > fits:
            raise Refused(
                "no_memory", f"--max-model-len {asked} was set, and the KV cache holds {fits} tokens", source, cache=True
            )
        return IntChoice(value=asked, reason="set by the user", source="user"), ()
    context, least = min(limit, fits), wish.min_context or 1
    if context < least:
        reason = f"a context of {least} tokens was asked for, and {context} fit"
        if limit < least:
            most = f"the model's own limit is {limit}" if limit == spec.max_position else f"one of at most {limit} as well"
            reason = f"a context of at least {least} tokens was asked for, and {most}"
        raise Refused("no_memory", reason, source, cache=limit >= least)
    if fits >= limit:
        own = f"the model's own limit is {spec.max_position}" if limit == spec.max_position else "the most that was asked for"
        return IntChoice(value=context, reason=own, source="config.json"), ()
    reason = f"the largest that fits into {gib(kv_bytes)} of KV cache"
    if source != "memory model":
        reason = "the largest that the engine itself said fits"
    warning = f"The context is {context} tokens; the model could do {limit} with more memory."
    return IntChoice(value=context, reason=reason, source=source), (warning,)
