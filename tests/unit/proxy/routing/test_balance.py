"""The choice of a replica, as arithmetic: the weight of a call, the begin of its prompt, and the
chosen replica."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.api.protocol import read_request_fields
from gateway.proxy.api.request_fields import RequestFields
from gateway.proxy.routing.balance import (
    BOUND,
    MAX_TOKENS,
    MESSAGES_BYTES,
    MIN_BYTES,
    USUAL_TOKENS,
    estimate_tokens,
    least_loaded_position,
    pick_by_prefix,
    prefix,
)

SYSTEM = {"role": "system", "content": "You are helpful. " * 30}
SEEDS = [zlib.crc32(f"m.{index}.1".encode()) for index in range(8)]

loads_of = st.lists(st.integers(0, 10**7), min_size=1, max_size=8)
keys = st.integers(0, 2**32 - 1)
tokens_of = st.integers(1, MAX_TOKENS)


def request_fields(**fields: Any) -> RequestFields:
    return read_request_fields(json.dumps({"model": "m", **fields}).encode())


# --- the weight of a call ---


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_call_weighs_its_prompt_and_requested_answer(field: str) -> None:
    assert estimate_tokens(request_fields(**{field: 100}), 4000) == 1000 + 100


@pytest.mark.parametrize("limit", [None, "100", 1.5, -3, True, [], 10**30])
def test_a_limit_without_a_number_weighs_the_usual_or_the_largest_answer(limit: Any) -> None:
    assert estimate_tokens(request_fields(max_tokens=limit), 400) in (
        100 + USUAL_TOKENS,
        MAX_TOKENS,
    )


def test_no_call_weighs_more_than_the_most() -> None:
    assert estimate_tokens(request_fields(max_tokens=999_999_999), 10) == MAX_TOKENS
    assert estimate_tokens(request_fields(), 32 * 1024 * 1024) == MAX_TOKENS


# --- how a prompt begins ---


def test_the_turns_of_one_conversation_alone_share_a_beginning() -> None:
    turns: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "First question"}]
    begins = [prefix(request_fields(messages=turns))]
    for number in range(3):
        turns += [
            {"role": "assistant", "content": f'{{"answer": {number}}}'},
            {"role": "user", "content": "And then?"},
        ]
        begins.append(prefix(request_fields(messages=turns, temperature=number)))
    assert len(set(begins)) == 1
    assert (
        prefix(request_fields(messages=[SYSTEM, {"role": "user", "content": "Other question"}]))
        != begins[0]
    )


def test_spaces_between_messages_make_no_difference_to_the_turns() -> None:
    turns = [SYSTEM, {"role": "user", "content": "First"}]
    longer = [*turns, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
    begins = {
        prefix(
            read_request_fields(json.dumps({"model": "m", "messages": messages}, indent=2).encode())
        )
        for messages in (turns, longer)
    }
    assert len(begins) == 1


def test_words_that_a_user_quotes_are_no_answer() -> None:
    quoting = [SYSTEM, {"role": "user", "content": 'the role "assistant" is a string'}]
    plain = [SYSTEM, {"role": "user", "content": "the role "}]
    assert prefix(request_fields(messages=quoting)) != prefix(request_fields(messages=plain))


@pytest.mark.parametrize(
    "fields",
    [
        {"system": "s" * 300, "messages": [{"role": "user", "content": "hi"}]},
        {"instructions": "s" * 300, "input": "hi"},
        {"input": [{"role": "user", "content": "s" * 300}]},
        {"prompt": "s" * 300},
        {"prompt": ["s" * 300, "t"]},
        {"input": [1] * 300},
    ],
)
def test_every_api_has_beginnings(fields: dict[str, Any]) -> None:
    assert prefix(request_fields(**fields)) is not None
    other_conversation = json.loads(
        json.dumps(fields).replace("s" * 300, "u" * 300).replace("1, 1", "2, 2")
    )
    assert prefix(request_fields(**other_conversation)) != prefix(request_fields(**fields))


def test_a_growing_text_begins_as_before() -> None:
    assert prefix(request_fields(prompt="x" * 2000)) == prefix(
        request_fields(prompt="x" * 2000 + "more")
    )


def test_a_short_beginning_has_no_place_of_its_own() -> None:
    assert prefix(request_fields(messages=[{"role": "user", "content": "hi"}])) is None
    assert prefix(request_fields()) is None
    assert prefix(request_fields(prompt="x" * MIN_BYTES)) is not None


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_value_of_messages_is_read_without_complaint(value: Any) -> None:
    call = request_fields(messages=value, prompt=value, input=value, system=value, max_tokens=value)
    assert prefix(call) == prefix(call)
    assert 1 <= estimate_tokens(call, 100) <= MAX_TOKENS


def test_a_beginning_is_the_same_number_in_every_process() -> None:
    body = json.dumps({"model": "m", "messages": [SYSTEM]})
    code = (
        "import sys; from gateway.proxy.api import protocol; from gateway.proxy.routing import"
        " balance; print(balance.prefix(protocol.read_request_fields(sys.stdin.buffer.read())))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], input=body.encode(), capture_output=True, check=True
    ).stdout
    assert int(result) == prefix(read_request_fields(body.encode()))


# --- where it leads ---


@given(loads_of, tokens_of, keys)
def test_no_replica_is_taken_beyond_the_bound(loads: list[int], tokens: int, key: int) -> None:
    position = pick_by_prefix(loads, SEEDS[: len(loads)], tokens, key)
    assert 0 <= position < len(loads)
    assert loads[position] <= BOUND * (sum(loads) + tokens) / len(loads)
    assert position == pick_by_prefix(loads, SEEDS[: len(loads)], tokens, key)


@given(loads_of, st.randoms())
def test_the_least_loaded_replica_is_taken_without_a_beginning(
    loads: list[int], chance: random.Random
) -> None:
    turns = [chance.randrange(10) for _ in loads]
    position = least_loaded_position(loads, turns)
    assert (loads[position], turns[position]) == min(zip(loads, turns, strict=True))


@given(keys, st.integers(2, 8))
def test_a_replica_that_goes_moves_only_its_own_prompts(key: int, count: int) -> None:
    before = pick_by_prefix([0] * count, SEEDS[:count], 100, key)
    for index_of_leaver in set(range(count)) - {before}:
        seeds_left = [seed for index, seed in enumerate(SEEDS[:count]) if index != index_of_leaver]
        assert seeds_left[pick_by_prefix([0] * (count - 1), seeds_left, 100, key)] == SEEDS[before]


def test_prompts_spread_evenly_over_replicas() -> None:
    chance = random.Random(5)
    for count in (2, 3, 5, 8):
        counts = Counter(
            pick_by_prefix([0] * count, SEEDS[:count], 1, chance.getrandbits(32))
            for _ in range(8000)
        )
        assert min(counts.values()) > 0.85 * 8000 / count
        assert max(counts.values()) < 1.15 * 8000 / count


def test_a_prompt_that_everybody_sends_loads_all_replicas_within_the_bound() -> None:
    loads = [0] * 4
    for _ in range(1000):
        loads[pick_by_prefix(loads, SEEDS[:4], 700, 12345)] += 700
    assert max(loads) <= BOUND * sum(loads) / 4 + 700
    assert min(loads) > 0


def test_turns_stay_with_their_replica_while_it_is_not_above_the_others() -> None:
    chance = random.Random(7)
    conversations = [chance.getrandbits(32) for _ in range(200)]
    loads = [0] * 4
    home = [pick_by_prefix(loads, SEEDS[:4], 700, key) for key in conversations]
    flying: list[tuple[int, int]] = []
    hits = total = 0
    for _ in range(4000):
        number = chance.randrange(200)
        cost = chance.randrange(200, 2000)
        position = pick_by_prefix(loads, SEEDS[:4], cost, conversations[number])
        hits, total = hits + (position == home[number]), total + 1
        loads[position] += cost
        flying.append((position, cost))
        if len(flying) > 64:
            ended_position, weight = flying.pop(chance.randrange(len(flying)))
            loads[ended_position] -= weight
    assert hits / total > 0.7


def test_only_the_beginning_of_a_long_prompt_is_looked_at() -> None:
    """So that a choice costs the same for each."""

    def begins(rest: str) -> int | None:
        return prefix(
            request_fields(messages=[{"role": "user", "content": "x" * MESSAGES_BYTES + rest}])
        )

    assert begins("y" * 1_000_000) == begins("z" * 2_000_000)
