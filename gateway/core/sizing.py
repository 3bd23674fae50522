"""The sizes of a candidate: batch, memory budget, KV cache, context. Pure.

Candidate -> Batch -> Budget -> Memory -> the largest context that fits: Sizes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.core import memory as mem
from gateway.core.batch import Batch, batch
from gateway.core.budget import GRAPHS_IN_BUDGET, budget, divided, gib
from gateway.core.candidate import Candidate
from gateway.core.ways import Refused
from gateway.domain import Choice, Fact, Memory, Scalar

# A context that serves most chats and agents; among plans that all load, one that offers less ranks behind one that
# offers it. Only a preference: `min_context` is the user's hard limit.
COMFORTABLE_CONTEXT = 32768
_LEAST_KV = 16 * mem.MIB


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
    memory = found.memory = divided(candidate, size.load, bounds.bytes)
    used = memory.weights_bytes + memory.activation_bytes + memory.overhead_bytes
    used += memory.graph_bytes if GRAPHS_IN_BUDGET in engine.traits else 0
    if used > bounds.bytes:
        reason = f"{gib(used)} are needed beside the KV cache, and {gib(bounds.bytes)} are to be had ({bounds.words})"
        raise Refused("no_memory", reason, "memory model")
    # On a CPU never left out: without a size the engine takes nearly all memory, even for a model that keeps no cache.
    flags = {"kv-cache-memory-bytes": max(memory.kv_bytes, _LEAST_KV)} if engine.device == "cpu" else bounds.flags
    scope = _scope(candidate, bounds.words)
    context, warnings = _context(candidate, memory.kv_bytes, size.load.batched_tokens, scope)
    if memory.kv_bytes:
        requests = candidate.cache.requests(memory.kv_bytes, context.value, size.load.batched_tokens)
        memory = found.memory = memory.evolve(full_requests=round(requests, 2))
    return Sizes(size, memory, context, dict(flags), scope, warnings)


def _scope(candidate: Candidate, budget_words: str) -> dict[str, str]:
    spec, way, group = candidate.given.spec, candidate.way, candidate.group
    scope = {
        "engine": candidate.engine.ref,
        "model": f"{spec.source}@{spec.revision}" if spec.revision else spec.source,
        "device": f"{group[0].name} sm_{group[0].capability}" if group else f"cpu {candidate.given.hardware.arch}",
        "tensor_parallel": str(way.tp),
        "dtype": candidate.dtype.value,
        "budget": budget_words,
    }
    scope |= {"capability": group[0].capability} if group and group[0].capability else {}
    scope |= {"pipeline_parallel": str(way.pp)} if way.pp > 1 else {}
    return scope | ({"kv_cache_dtype": way.kv_dtype} if way.kv_dtype != "auto" else {})


def _limit(candidate: Candidate) -> int:
    longest = candidate.given.spec.max_position
    return min(longest, candidate.given.wish.max_context or longest)


def _context(
    candidate: Candidate, kv_bytes: int, batched: int, scope: Mapping[str, str]
) -> tuple[Choice[int], tuple[str, ...]]:
    """The largest context that fits and is wanted, and a warning where it is not all that the model could do."""
    spec, wish, limit = candidate.given.spec, candidate.given.wish, _limit(candidate)
    fits, source = candidate.cache.largest(kv_bytes, batched, max(limit, spec.max_position)), "memory model"
    for fact in candidate.given.facts:
        if fact.kind == "max_context" and fact.value is not None and fact.value < fits and _holds(fact, scope):
            fits, source = fact.value, f"fact: {fact.source}"
    if "max-model-len" in candidate.args:
        asked = int(candidate.args["max-model-len"])
        if asked > fits:
            raise Refused("no_memory", f"--max-model-len {asked} was set, and the KV cache holds {fits} tokens", source)
        return Choice[int](value=asked, reason="set by the user", source="user"), ()
    context, least = min(limit, fits), wish.min_context or 1
    if context < least:
        raise Refused("no_memory", f"a context of {least} tokens was asked for, and {context} fit", source)
    if fits >= limit:
        own = f"the model's own limit is {spec.max_position}" if limit == spec.max_position else "the most that was asked for"
        return Choice[int](value=context, reason=own, source="config.json"), ()
    reason = f"the largest that fits into {gib(kv_bytes)} of KV cache"
    if source != "memory model":
        reason = "the largest that the engine itself said fits"
    warning = f"The context is {context} tokens; the model could do {limit} with more memory."
    return Choice[int](value=context, reason=reason, source=source), (warning,)


def _holds(fact: Fact, scope: Mapping[str, str]) -> bool:
    return all(scope.get(key) == value for key, value in fact.scope.items())
