"""Requests of Ollama's API as requests of /v1."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.proxy.ollama.ollama_requests import chat_request, embed_request, generate_request

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(30)).decode()
USER = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    return chat_request({"model": "m", "messages": USER, "stream": False, **fields}).body


def test_options_have_the_names_of_v1() -> None:
    options = {"num_predict": 5, "repeat_penalty": 1.1, "seed": 3, "num_ctx": 99, "stop": ["a"]}
    assert chat(options=options) == {
        "model": "m",
        "messages": USER,
        "max_tokens": 5,
        "repetition_penalty": 1.1,
        "seed": 3,
        "stop": ["a"],
    }
    # Below 0 Ollama sets no limit.
    assert "max_tokens" not in chat(options={"num_predict": -1})
    assert chat(format="json")["response_format"] == {"type": "json_object"}
    schema = {"type": "object"}
    assert chat(format=schema)["response_format"]["json_schema"]["schema"] == schema
    assert chat(think=False)["chat_template_kwargs"] == {"enable_thinking": False}
    assert chat(think="low")["reasoning_effort"] == "low"


def test_an_answer_is_a_stream_unless_none_is_wanted() -> None:
    stream_request = chat_request({"model": "m", "messages": USER})
    assert stream_request.stream
    assert stream_request.body["stream_options"] == {"include_usage": True}
    assert not chat_request({"model": "m", "messages": USER, "stream": False}).stream


def test_results_of_tools_belong_to_the_calls_before_them() -> None:
    calls = [{"function": {"name": name, "arguments": {"x": name}}} for name in ("a", "b")]
    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "b", "content": "2"},
        {"role": "tool", "content": "1"},
    ]
    _, assistant, *results = chat(messages=messages, tools=[{"type": "function"}])["messages"]
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_1", "call_2"]
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"x": "a"}'
    assert [result["tool_call_id"] for result in results] == ["call_2", "call_1"]


def test_ids_of_calls_are_kept() -> None:
    calls = [{"id": f"id_{number}", "function": {"name": "f"}} for number in (1, 2)]
    messages = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_name": "f", "tool_call_id": "id_2", "content": "2"},
        {"role": "tool", "tool_name": "f", "content": "1"},
        {"role": "tool", "tool_call_id": "id_9", "content": "0"},
    ]
    assistant, *results = chat(messages=messages)["messages"]
    assert [call["id"] for call in assistant["tool_calls"]] == ["id_1", "id_2"]
    assert [result["tool_call_id"] for result in results] == ["id_2", "id_1", "id_9"]


def test_images_become_addresses_of_data() -> None:
    message = {"role": "user", "content": "What?", "images": [PNG]}
    text, image = chat(messages=[message])["messages"][0]["content"]
    assert text == {"type": "text", "text": "What?"}
    assert image["image_url"]["url"] == f"data:image/png;base64,{PNG}"


def test_a_prompt_is_a_chat_unless_it_is_raw() -> None:
    body = {"model": "m", "prompt": "Why?", "system": "Be short."}
    request = generate_request(body)
    assert request.path == "/v1/chat/completions"
    assert [message["role"] for message in request.body["messages"]] == ["system", "user"]
    raw = generate_request({**body, "raw": True})
    assert (raw.path, raw.body["prompt"]) == ("/v1/completions", "Why?")
    for more in ({}, {"raw": True}):
        request = generate_request({**body, **more, "suffix": "end"})
        assert (request.path, request.body["suffix"]) == ("/v1/completions", "end")
    loads = generate_request({"model": "m"})
    assert (loads.loads_model, loads.body["max_tokens"]) == (True, 1)
    assert chat_request({"model": "m", "messages": []}).loads_model


def test_texts_are_embedded_one_or_many() -> None:
    request = embed_request({"model": "e", "input": ["a", "b"], "dimensions": 8, "truncate": False})
    assert request.body == {"model": "e", "input": ["a", "b"], "dimensions": 8}
    assert embed_request({"model": "e", "prompt": "a"}).body["input"] == "a"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "x"},
        {"options": [1]},
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        {"format": "yaml"},
        {"messages": [{"role": "user", "images": [5]}]},
        {"messages": [{"role": "user", "images": "a"}]},
        {"messages": [{"role": "user", "images": [{"url": "a"}]}]},
        {"messages": [{"role": "user", "images": ["\u20ac"]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
    ],
)
def test_a_field_of_another_form_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        chat(**fields)
