"""Expected speed of a plan: its work on its GPUs, as the figures that a user notices. Pure.

expected_speed(load, clock, ratios) -> Speed
scale_speed(plan, count) -> the plan as this many replicas serve it
lengths(context) -> tokens of prompt and answer that it counts with
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from gateway.domain import Estimate, Plan, Speed
from gateway.engines.common.speed.correction import Ratio, estimate
from gateway.engines.common.speed.step import StepClock

# Tokens that a request of the many reads and writes: a chat with some history, an agent's step.
PROMPT_TOKENS = 1024
ANSWER_TOKENS = 256
_SHORT_PROMPT_TOKENS = 2048
_LONG_PROMPT_TOKENS = 32768


class PlanLoad(NamedTuple):
    """The load of a plan.

    concurrency: simultaneous requests, over all `replicas`.
    seqs, tokens: the maximum of one step of a replica.
    kv_tokens: tokens that its cache holds; 0: the cache does not grow.
    context: the longest request.
    """

    concurrency: int
    replicas: int
    seqs: int
    tokens: int
    kv_tokens: int
    context: int


def lengths(context: int) -> tuple[int, int]:
    """Tokens that each of the many reads and writes, where requests have this much context."""
    part = context * PROMPT_TOKENS // (PROMPT_TOKENS + ANSWER_TOKENS)
    read = max(1, min(PROMPT_TOKENS, part))  # a context of one token has a prompt too
    return read, max(1, min(ANSWER_TOKENS, context - read))


def expected_speed(
    load: PlanLoad, clock: StepClock, ratios: Mapping[str, Ratio] | None = None
) -> Speed:
    """The expected speed. ratios: by figure, measured speed relative to expected speed of similar
    plans."""
    limit = load.tokens
    band = clock.table.band
    ratios = ratios or {}
    read, answer_tokens = lengths(load.context)
    held_requests = load.kv_tokens // (read + answer_tokens) if load.kv_tokens else load.seqs
    at_once = max(1, min(math.ceil(load.concurrency / load.replicas), load.seqs, held_requests))
    used_replicas = min(load.replicas, load.concurrency)
    short_prompt = min(_SHORT_PROMPT_TOKENS, load.context)
    has_long_prompts = load.context >= _LONG_PROMPT_TOKENS
    key = (
        at_once,
        used_replicas,
        load.concurrency,
        read,
        answer_tokens,
        limit,
        short_prompt,
        has_long_prompts,
    )
    if not ratios and key in clock.speeds:
        return clock.speeds[key]
    figures = {
        "stream": 1 / clock.decode_s(1, _SHORT_PROMPT_TOKENS),
        "total": used_replicas * clock.total_per_s(at_once, read, answer_tokens, limit),
        "first_token_2k_s": clock.first_token_s(short_prompt, limit),
    }
    figures |= (
        {"first_token_32k_s": clock.first_token_s(_LONG_PROMPT_TOKENS, limit)}
        if has_long_prompts
        else {}
    )
    known_ratios = {figure: ratio for figure, ratio in ratios.items() if figure in figures}
    figures_told = {
        figure: estimate(
            value * (known_ratios[figure].value if figure in known_ratios else 1), band
        )
        for figure, value in figures.items()
    }
    correction_words = (
        "; corrected by what was measured of " + next(iter(known_ratios.values())).source
        if known_ratios
        else ""
    )
    speed = Speed(
        **figures_told,
        concurrency=min(load.concurrency, at_once * used_replicas),
        source=clock.machine.source + correction_words,
        ratios={figure: ratio.value for figure, ratio in known_ratios.items()},
    )
    if not ratios:
        clock.speeds[key] = speed
    return speed


def scale_speed(plan: Plan, count: int) -> Plan:
    """The speed of several replicas, from the expected or measured speed of one."""
    former_count = plan.replicas.value
    speed = plan.speed
    if former_count == count:
        return plan
    if speed is not None:
        part = count / former_count
        total = Estimate(
            value=speed.total.value * part, low=speed.total.low * part, high=speed.total.high * part
        )
        speed = speed.evolve(
            total=total, concurrency=math.ceil(speed.concurrency * count / former_count)
        )
    return plan.evolve(replicas=plan.replicas.evolve(value=count), speed=speed)
