"""Thoughts under one name, in answers of any framing and in requests with earlier answers."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.bodies.thoughts import rename_for_engine, rename_thoughts

DELTA = {"role": None, "content": None, "reasoning_content": "hm ", "tool_calls": None}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def test_the_name_changes_and_no_length_does() -> None:
    event = b"data: " + compact({"choices": [{"delta": DELTA}]}) + b"\n\n"
    data, rest = rename_thoughts(event)
    assert (len(data), rest) == (len(event), b"")
    delta = json.loads(data.removeprefix(b"data: "))["choices"][0]["delta"]
    assert delta["reasoning"] == "hm "
    assert "reasoning_content" not in delta


@pytest.mark.parametrize(
    "text", ['"reasoning_content":', 'a "reasoning_content": "b"', "reasoning_content", '"']
)
def test_a_text_that_contains_the_name_of_the_field_is_unchanged(text: str) -> None:
    whole = compact({"content": text})
    assert rename_thoughts(whole) == (whole, b"")


@given(st.lists(st.integers(0, 400), max_size=12))
def test_reads_may_end_anywhere(cuts: list[int]) -> None:
    messages = [DELTA, {"content": '"reasoning_content":', "reasoning_content": None}, DELTA]
    whole = compact({"choices": messages})
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    output, rest = b"", b""
    for start, end in pairwise(places):
        data, rest = rename_thoughts(rest + whole[start:end])
        output += data
    assert rest == b""
    assert output == rename_thoughts(whole)[0]
    assert [choice.get("reasoning") for choice in json.loads(output)["choices"]] == [
        "hm ",
        None,
        "hm ",
    ]


def test_earlier_thoughts_reach_the_engine_under_its_name() -> None:
    request = {
        "model": "m",
        "temperature": 0.1,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "a", "reasoning": "hm"},
            {"role": "assistant", "content": "b", "reasoning": "x", "reasoning_content": "y"},
        ],
        "reasoning": {"effort": "low"},
    }
    document = json.loads(rename_for_engine(json.dumps(request).encode()))
    assert document["messages"][1] == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "hm",
    }
    assert document["messages"][2]["reasoning_content"] == "y"
    assert {**document, "messages": None} == {**request, "messages": None}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"hi"}]}',
        b'{"model":"m","messages":[],"reasoning":{"effort":"low"}}',
        b'{"model":"m","messages":"reasoning"}',
        b'{"model":"m","messages":[{"role":"user","content":"x","reasoning":null}]}',
    ],
)
def test_other_requests_keep_every_byte(body: bytes) -> None:
    assert rename_for_engine(body) == body
