"""The values of sizing: batch, budget and context of one engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gateway.domain import Cap, Choice, Memory, ModelSpec, Plan, Scalar, Wish
from gateway.engines.common.speed.objective import LONG_REQUESTS_MAX, concurrency

# A context that serves most chats and agents. A loadable plan with a shorter context
# ranks behind a plan with this context. This is a preference: `least_context` is the hard limit.
COMFORTABLE_CONTEXT = 32768
# A context below this and below the wished one is not a reason to keep the weights as they are.
MIN_USEFUL = 4096
# A budget that is cut to the need also gets this share of its other memory.
UNCERTAINTY_PARTS = 20


def context_limit(spec: ModelSpec, wish: Wish) -> int:
    """The longest context in tokens that model and user allow."""
    if spec.has_open_limit:
        return wish.most_context or spec.max_position
    return min(spec.max_position, wish.most_context or spec.max_position)


def wanted_context(spec: ModelSpec, wish: Wish, args: Mapping[str, Scalar]) -> int:
    """Tokens that the user asked for, or would be content with. args: the user's flags by canonical
    names."""
    longest_context = min(
        spec.max_position,
        wish.most_context or spec.max_position,
        int(args.get("max-model-len", spec.max_position)),
    )
    return min(longest_context, wish.context or wish.min_context or COMFORTABLE_CONTEXT)


def shortcomings(plan: Plan, context_wanted: int, useful: int = MIN_USEFUL) -> tuple[bool, ...]:
    """Losses of a plan, smaller is better: no useful context, quantized weights, less context than
    the wish."""
    context = plan.max_model_len.value
    return context < min(useful, context_wanted), plan.quantizes_weights, context < context_wanted


def needed_tokens(wish: Wish, spec: ModelSpec) -> int:
    """Tokens of KV cache that suffice: few concurrent requests use their whole context."""
    return wanted_context(spec, wish, {}) * min(LONG_REQUESTS_MAX, concurrency(wish))


class Batch(NamedTuple):
    """Requests and tokens of a step; `eager`: without CUDA graphs."""

    seqs: Choice[int]
    tokens: Choice[int]
    eager: Choice[bool]


class Sizes(NamedTuple):
    """Batch, memory and context of a plan.

    `flags` set the engine's budget; `scope` is where facts about these sizes hold. `cap`: the
    bound of the budget.
    """

    batch: Batch
    memory: Memory
    context: Choice[int]
    flags: dict[str, Scalar]
    scope: dict[str, str]
    warnings: tuple[str, ...]
    cap: Cap | None = None
