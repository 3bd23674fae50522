"""Limits of keys: buckets that refill evenly, debts that are paid, headers that say how much is
left."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import RateLimited
from gateway.proxy.access.auth import ANONYMOUS_KEY, Key, KeyLimits
from gateway.proxy.access.budgets import Quota, TokenCount
from gateway.proxy.access.rate_limits import Bucket, KeyUsage, RateLimiter, estimate, tight_headers
from gateway.proxy.api.usage_block import structured_usage
from gateway.proxy.meter import TokenUsage, answer_usage, streamed_usage


def limited_key(**limit: Any) -> Key:
    return Key("app", b"d" * 32, frozenset({"inference"}), limit=KeyLimits(**limit))


@given(size=st.integers(1, 50), steps=st.lists(st.floats(0, 30), min_size=1, max_size=30))
def test_no_more_than_a_minutes_worth_at_once_and_as_much_again_per_minute(
    size: int, steps: list[float]
) -> None:
    bucket, now, token_count = Bucket(size, 0.0), 0.0, 0
    for step in steps:
        now += step
        while bucket.level(now) >= 1:
            bucket.draw(1, now)
            token_count += 1
        assert token_count <= size + now * size / 60 + 1e-6


@given(size=st.integers(1, 10**6), owed=st.integers(0, 10**7), at=st.floats(0, 10**6))
def test_a_client_that_waits_as_long_as_it_was_told_is_let_in(
    size: int, owed: int, at: float
) -> None:
    account = KeyUsage(KeyLimits(tokens_per_minute=size), at)
    assert account.tokens is not None
    account.tokens.draw(size + owed, at)
    with pytest.raises(RateLimited) as error:
        account.admit("openai", at)
    wait_s = error.value.retry_after_s
    assert wait_s is not None
    assert wait_s >= 1
    account.admit("openai", at + wait_s + 1e-6)


def test_an_ended_request_frees_its_slot_but_not_its_minute() -> None:
    limiter, key = RateLimiter(), limited_key(in_flight=1, requests_per_minute=2)
    first = limiter.admit(key, "openai", 0.0)
    assert first is not None
    with pytest.raises(RateLimited, match="concurrent requests"):
        limiter.admit(key, "openai", 0.0)
    first.finish(TokenCount(5), 0.0)
    second = limiter.admit(key, "openai", 0.0)
    assert second is not None
    second.finish(TokenCount(5), 0.0)
    with pytest.raises(RateLimited, match="2 requests per minute"):
        limiter.admit(key, "openai", 0.0)
    assert limiter.admit(key, "openai", 30.0) is not None


def test_a_key_without_limits_and_a_removed_key_have_no_account() -> None:
    limiter, key = RateLimiter(), limited_key(requests_per_minute=1)
    assert limiter.admit(ANONYMOUS_KEY, "openai", 0.0) is None
    limiter.admit(key, "openai", 0.0)
    limiter.retain([key.digest])
    with pytest.raises(RateLimited):
        limiter.admit(key, "openai", 0.0)
    limiter.retain([])
    assert limiter.admit(key, "openai", 0.0) is not None


def test_the_rest_of_a_limit_is_told_in_the_shape_of_the_api() -> None:
    account = KeyUsage(KeyLimits(requests_per_minute=60, tokens_per_minute=600), 0.0)
    account.admit("openai", 0.0)
    assert account.tokens is not None
    account.tokens.draw(5, 0.0)
    assert dict(tight_headers(account.quotas(0.0), "openai")) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"595",
        b"x-ratelimit-reset-tokens": b"500ms",
    }
    account.tokens.draw(1200, 0.0)
    before = time.time()
    headers = dict(tight_headers(account.quotas(0.0), "anthropic"))
    after = time.time()
    assert headers[b"anthropic-ratelimit-tokens-remaining"] == b"0"
    reset = datetime.strptime(
        headers[b"anthropic-ratelimit-tokens-reset"].decode(), "%Y-%m-%dT%H:%M:%SZ"
    ).replace(tzinfo=UTC)
    assert before + 120.5 <= reset.timestamp() <= after + 121.5
    assert (
        dict(tight_headers(account.quotas(0.0), "openai"))[b"x-ratelimit-reset-tokens"] == b"2m1s"
    )


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.booleans(), st.integers(1, 10**9))
def test_an_estimate_is_never_more_than_a_minutes_worth(
    reserved_tokens: int, sent: int, events: bool, limit: int
) -> None:
    assert 0 <= estimate(reserved_tokens, sent, is_stream=events, limit=limit) <= limit


@pytest.mark.parametrize(
    ("tail", "tokens"),
    [
        (
            (
                b'{"choices":[],"usage":{"prompt_tokens":30,"total_tokens":50,'
                b'"completion_tokens":20}}',
            ),
            (30, 20, None),
        ),
        (
            (
                b'data: {"usage":{"input_tokens": 3, "output_to',
                b'kens" : 4}}\n\n',
                b"data: [DONE]\n\n",
            ),
            (3, 4, None),
        ),
        ((b'{"usage":{"prompt_tokens":7,"total_tokens":7}}',), (7, None, None)),
        ((b'{"usage":{"output_tokens":7}}',), (None, 7, None)),
        (
            (
                b'{"usage":{"input_tokens":3,"output_tokens":4,"cache_read_input_tokens":90,'
                b'"cache_creation_input_tokens":7}}',
            ),
            (100, 4, 90),
        ),
        (
            (
                b'{"usage":{"input_tokens":93,"input_tokens_details":{"cached_tokens":90},'
                b'"output_tokens":4}}',
            ),
            (93, 4, 90),
        ),
        (
            (
                b'{"usage":{"prompt_tokens":93,"total_tokens":97,"completion_tokens":4,'
                b'"prompt_tokens_details":{"cached_tokens":90}}}',
            ),
            (93, 4, 90),
        ),
        (
            (b'{"usage":{"prompt_tokens":93,"completion_tokens":4,"prompt_tokens_details":null}}',),
            (93, 4, None),
        ),
        ((b'data: {"usage":null}\n\n', b"data: [DONE]\n\n"), (None, None, None)),
        (
            (
                b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}\n',
                b'{"usage":{"prompt_tokens":9,"completion_tokens":8}}',
            ),
            (9, 8, None),
        ),
        # Usage in the words of a model or a client is in a string, where quotes are escaped.
        (
            (
                b'{"text":"\\"usage\\":{\\"prompt_tokens\\":0}","usage":{"prompt_tokens":5,'
                b'"completion_tokens":6}}',
            ),
            (5, 6, None),
        ),
        (
            (
                b'{"usage":{"prompt_tokens":5,"completion_tokens":6},'
                b'"text":"\\"usage\\":{\\"prompt_tokens\\":0}"}',
            ),
            (5, 6, None),
        ),
        ((b'{"usage":{"prompt_tokens":"5","completion_tokens":-6}}',), (None, None, None)),
        # An answer that is cut off tells nothing: its tokens are estimated.
        ((b'{"usage":{"prompt_tokens":' + b"9" * 5000,), (None, None, None)),
        ((b'{"usage":{"prompt_tokens":' + b"9" * 5000 + b"}}",), (None, None, None)),
        # The word elsewhere: fields that clients fill and engines repeat, before and behind.
        *(
            ((answer,), (50, 9, None))
            for usage_ in (b'"usage":{"input_tokens":50,"output_tokens":9}',)
            for forgery in (b'"usage":{"prompt_tokens":0,"completion_tokens":0}',)
            for answer in (
                b'{"id":"r",%b,"user":"usage"}' % usage_,
                b'{%b,"prompt_logprobs":[{"7":{"decoded_token":"usage"}}],"a":null}' % usage_,
                b'{%b,"input_messages":[{%b}]}' % (usage_, forgery),
                b'{%b,"metadata":{%b}}' % (usage_, forgery),
                b'{%b,"metadata":{"a":{%b}},"user":"}"}' % (usage_, forgery),
                b'{"metadata":{%b},%b,"user":"\\"usage\\":{}"}' % (forgery, usage_),
                b'r":"x"}}\n\ndata: {"response":{%b,"user":"usage"},"type":"t"}\n\n' % usage_,
                b'data: {"type":"t","response":{"tools":[{%b}],%b,"metadata":{"usage":"0"}}}\n\n'
                % (forgery, usage_),
            )
        ),
        ((b'ls":[{"usage":{"prompt_tokens":0,"completion_tokens":0}}]}',), (None, None, None)),
        ((b'b":{"c":{"usage":{"prompt_tokens":0,"completion_tokens":0}}}}',), (None, None, None)),
        ((), (None, None, None)),
    ],
)
def test_usage_is_read_in_the_tail_alone(tail: tuple[bytes, ...], tokens: TokenUsage) -> None:
    assert answer_usage(tail) == tokens
    # The quick reading never says anything else than the reading by place.
    assert structured_usage(b"".join(tail)) == tokens


def test_a_minute_of_one_request_is_a_minute() -> None:
    bucket = Bucket(1, 0.0)
    bucket.draw(1, 0.0)
    assert math.isclose(bucket.wait_s(1, 0.0), 60.0)


LEAD = b'data: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":25%b}}}\n\n'
DELTA = b'data: {"type":"message_delta","delta":{},"usage":{%b"output_tokens":12}}\n\n'


@pytest.mark.parametrize(
    ("lead", "tail", "tokens"),
    [
        (LEAD % b"", DELTA % b"", (25, 12, None)),
        (LEAD % b',"cache_read_input_tokens":90', DELTA % b"", (115, 12, 90)),
        (LEAD % b"", DELTA % b'"input_tokens":26,', (26, 12, None)),
        (b"data: {}\n\n", DELTA % b"", (None, 12, None)),
        (b"", DELTA % b"", (None, 12, None)),
        (LEAD % b"", b"data: [DONE]\n\n", (None, None, None)),
    ],
)
def test_a_prompt_that_the_end_of_a_stream_leaves_out_is_read_at_its_begin(
    lead: bytes, tail: bytes, tokens: TokenUsage
) -> None:
    assert streamed_usage(lead, (tail, b"event: message_stop\n\n")) == tokens


def test_a_token_counts_to_the_account_of_its_key() -> None:
    limiter, key = RateLimiter(), limited_key(requests_per_minute=2)
    token = replace(key, digest=b"t" * 32, principal=key.digest)
    for caller in (key, token):
        assert limiter.admit(caller, "openai", 0.0) is not None
    for caller in (key, token):
        with pytest.raises(RateLimited):
            limiter.admit(caller, "openai", 0.0)
    limiter.retain([key.digest, token.digest])
    with pytest.raises(RateLimited):
        limiter.admit(token, "openai", 0.0)


def test_the_headers_name_the_longer_wait_of_two_spent_limits() -> None:
    quotas = [Quota("requests", 60, 0, 1.0), Quota("requests", 900, 0, 7200.0)]
    for ordered_quotas in (quotas, quotas[::-1]):
        headers = dict(tight_headers(ordered_quotas, "openai"))
        assert headers[b"x-ratelimit-limit-requests"] == b"900"
        assert headers[b"x-ratelimit-reset-requests"] == b"2h0m0s"
