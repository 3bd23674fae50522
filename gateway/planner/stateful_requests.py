"""The concurrent requests whose recurrent states fit into the planned KV cache. Pure.

A request of a model with recurrent layers (gated delta nets, Mamba, short convolutions, linear
attention) keeps a state from its first token to its last. Some engine versions refuse to start with
CUDA graphs for more requests than blocks, after loading and compiling (the trait below). Requests
that surely have no state are refused, those that may have none get a warning. Other kinds compute
fewer concurrent requests than their flag says (`caps_requests`), so that nothing is kept back for
them.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.domain import Choice, int_choice
from gateway.domain.units import gib, plural
from gateway.engines.common.candidate import Footprint
from gateway.engines.common.refusal import RefusalError

# The size of a KV cache is an estimate. The estimate lacks this part of the memory that the rest
# may need beyond its own estimate. In 33 measured starts, all on _MEASURED_CAPABILITIES, it lacked
# a thirtieth at most (engines/vllm/memory.py). Elsewhere the whole band is kept back, and this part
# of the states at least: on 12.0 there were 939 state blocks of Qwen3.8-27B in FP8 where 1,122 were
# expected, and 556 of up to 760 in 16 bits (github.com/vllm-project/recipes/pull/831).
_UNCERTAINTY_PARTS = 4
_MEASURED_CAPABILITIES = ("9.0",)
_RESERVE_PARTS_ELSEWHERE = 3
# The reserve is at most this part of the states.
_MAX_RESERVE_PARTS = 2
# Many requests are planned in steps, so that readings of free memory that differ a little give the
# same plan.
_STEPS = ((64, 8), (16, 4))
_SOURCE = "state blocks"
_MAY_REFUSE = "may refuse to start, or compute fewer"
# The engine ends where more requests may come than its cache has states, if they have CUDA graphs.
_TRAIT = "requests_within_states"
# Levels without full graphs, which alone need a state for each request.
_LEVELS_WITHOUT_FULL_GRAPHS = ("0", "1")
# The search for the most requests takes at most this many trials.
_TRIALS = 5


class _States(NamedTuple):
    """The recurrent states that fit, in requests.

    `requests` surely have a state each, of `states` by the estimate; more than `max_count` have
    not.
    """

    requests: int
    expected_count: int
    max_count: int
    states: int
    kv_bytes: int


def stateful_requests(
    footprint: Footprint, limit: Choice[int], budget_bytes: int
) -> tuple[Choice[int], str]:
    """The concurrent requests, `limit` at most, and a warning if the user asked for more; "".

    Raises RefusalError where the engine would end for this many.
    """
    estimate = _estimate_states(footprint, budget_bytes)
    if estimate is None or limit.value <= estimate.requests:
        return limit, ""
    if limit.source == "user":
        if limit.value <= estimate.expected_count:
            return limit, ""
        excess_words = _excess_words(footprint, limit.value, estimate)
        candidate = footprint.candidate
        if limit.value > estimate.max_count and _ends_beyond_states(footprint):
            memory = candidate.rules.divide_budget(footprint, budget_bytes)
            raise RefusalError(
                "no_memory",
                f"{excess_words}, and the engine starts with no more",
                "memory model",
                evidence=candidate.evidence.add_sizes(memory),
            )
        effect = "computes no more" if candidate.rules.caps_requests else _MAY_REFUSE
        return limit, f"{excess_words}. The engine {effect}."
    requests, estimate = _search_requests(footprint, estimate, limit.value, budget_bytes)
    reason = _states_reason(footprint, estimate.kv_bytes)
    if requests < estimate.expected_count:
        reason += "; fewer, since that size is an estimate"
    return int_choice(requests, reason, _SOURCE), ""


def _ends_beyond_states(footprint: Footprint) -> bool:
    """Whether the engine ends where more requests may come than its cache has states."""
    candidate = footprint.candidate
    level = str(candidate.args.get("optimization-level", ""))
    has_full_graphs = footprint.load.graphs and level not in _LEVELS_WITHOUT_FULL_GRAPHS
    return has_full_graphs and _TRAIT in candidate.engine.traits


def limit_to_states(
    footprint: Footprint, planned_choice: Choice[int], kv_bytes: int
) -> Choice[int]:
    """The concurrent requests, `planned_choice` at most: those with a state each in a cache that
    earlier starts corrected."""
    per_request = footprint.cache.states_per_request
    if not per_request or planned_choice.source == "user":
        return planned_choice
    fits = footprint.cache.states(kv_bytes) // per_request
    if planned_choice.value <= fits or not fits:
        return planned_choice
    return int_choice(_round_down(fits), _states_reason(footprint, kv_bytes), _SOURCE)


def _states_reason(footprint: Footprint, kv_bytes: int) -> str:
    cache = footprint.cache
    per_request = cache.states_per_request
    text = f"{per_request} for each request" if per_request > 1 else "one for each request"
    states = cache.states(kv_bytes)
    return f"about {states} state blocks fit into {gib(kv_bytes)} of KV cache, {text}"


def _search_requests(
    footprint: Footprint, states: _States, limit: int, budget_bytes: int
) -> tuple[int, _States]:
    """The most requests that surely have a state each, and the states that fit in addition to
    these.

    states: the states that fit in addition to those of `limit` requests. Fewer requests leave more
        memory for states.
    """
    low = states.requests
    high = limit
    for _ in range(_TRIALS):
        estimate = _estimate_states(_replace_requests(footprint, low), budget_bytes) or states
        high = min(high, estimate.requests)
        middle = _round_down((low + high + 1) // 2)
        if middle <= low:
            break
        trial = _estimate_states(_replace_requests(footprint, middle), budget_bytes)
        if trial is not None and trial.requests >= middle:
            low = middle
            states = trial
        else:
            high = middle - 1
    return low, _estimate_states(_replace_requests(footprint, low), budget_bytes) or states


def _estimate_states(footprint: Footprint, budget_bytes: int) -> _States | None:
    """None: no layer has a state, or not one request has."""
    cache = footprint.cache
    rules = footprint.candidate.rules
    per_request = cache.states_per_request
    if not per_request:
        return None
    memory = rules.divide_budget(footprint, budget_bytes)
    states = cache.states(memory.kv_bytes)
    expected_count = states // per_request
    if not expected_count:
        return None
    if rules.caps_requests:
        return _States(
            _round_down(expected_count), expected_count, expected_count, states, memory.kv_bytes
        )
    unsure_bytes = max(0, memory.high - rules.used_bytes(footprint, memory))
    gpus = footprint.candidate.gpus
    if gpus and gpus[0].capability in _MEASURED_CAPABILITIES:
        unsure_bytes //= _UNCERTAINTY_PARTS
    else:
        unsure_bytes = max(unsure_bytes, memory.kv_bytes // _RESERVE_PARTS_ELSEWHERE)
    sure_count = cache.states(max(0, memory.kv_bytes - unsure_bytes)) // per_request
    sure_count = _round_down(max(1, sure_count, expected_count // _MAX_RESERVE_PARTS))
    spare = max(0, rules.used_bytes(footprint, memory) - memory.low)
    max_count = cache.states(memory.kv_bytes + spare) // per_request
    return _States(sure_count, expected_count, max_count, states, memory.kv_bytes)


def _round_down(requests: int) -> int:
    step = next((step for minimum, step in _STEPS if requests >= minimum), 1)
    return requests // step * step


def _replace_requests(footprint: Footprint, requests: int) -> Footprint:
    """The footprint with this many concurrent requests."""
    return footprint.evolve(load=footprint.load._replace(seqs=requests))


def _excess_words(footprint: Footprint, cap: int, states: _States) -> str:
    flag = footprint.candidate.engine.spelling.get("max-num-seqs", "max-num-seqs")
    return (
        f"--{flag}={cap} was set, and about {states.states} state blocks fit into"
        f" {gib(states.kv_bytes)} of KV cache: enough for"
        f"  {plural(states.expected_count, 'concurrent request')}"
    )
