"""Errors of engines, in the form of the client's API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.proxy.api.endpoints import ENDPOINTS, Endpoint, find
from gateway.proxy.api.engine_errors import engine_error

CHAT = find("/v1/chat/completions", b"", "POST")
MESSAGES = find("/v1/messages", b"", "POST")


def error_of(status: int, content: Any, endpoint: Endpoint = CHAT) -> dict[str, Any]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    error: dict[str, Any] = json.loads(engine_error(status, body, endpoint))["error"]
    return error


def test_an_error_has_openais_type_and_no_status_as_its_code() -> None:
    of_engine = {"message": "max_tokens is too large", "type": "Bad Request", "code": 400}
    expected_error = {
        "message": "max_tokens is too large",
        "type": "invalid_request_error",
        "param": "max_tokens",
        "code": None,
    }
    assert error_of(400, {"error": {**of_engine, "param": "max_tokens"}}) == expected_error
    assert error_of(400, {**of_engine, "param": "max_tokens"}) == expected_error


def test_an_error_of_another_gateway_stays_as_it_is() -> None:
    error = {
        "message": "qwen is starting.",
        "type": "service_unavailable",
        "param": "model",
        "code": "model_not_ready",
    }
    assert error_of(503, {"error": error}) == error


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error")]
)
def test_an_unknown_type_becomes_that_of_the_status(status: int, kind: str) -> None:
    assert error_of(status, {"detail": "no"})["type"] == kind
    assert error_of(status + 100, b"\xffbroken")["type"] in ("api_error", "server_error")


PROBLEM = "{'type': 'missing', 'loc': %s, 'msg': 'Field required', 'input': {'mesages': []}}"


@pytest.mark.parametrize("place", ["('body', 'messages')", "'body.messages'"])
def test_problems_of_pydantic_are_a_sentence_with_the_field(place: str) -> None:
    text = f"1 validation error: {PROBLEM % place}"
    of_engine = {"message": text, "type": "Bad Request", "param": "body.messages", "code": 400}
    error = error_of(400, {"error": of_engine})
    assert (error["message"], error["param"]) == ("messages: is missing.", "messages")


@pytest.mark.parametrize("endpoint", [CHAT, MESSAGES])
def test_a_misspelt_field_of_the_request_is_named(endpoint: Endpoint) -> None:
    problem = PROBLEM % "('body', 'messages')"
    text = f"1 validation error: {problem}"
    body = json.dumps({"error": {"message": text, "code": 400}}).encode()

    def message(request: bytes) -> str:
        words: str = json.loads(engine_error(400, body, endpoint, request))["error"]["message"]
        return words

    hint = " Did you mean `messages` instead of `mesages`?"
    assert message(b'{"model": "m", "mesages": []}').endswith(hint)
    for request in (b"", b"\xff", b"[]", b'{"model": "m"}', b'{"messages": 1, "mesages": []}'):
        assert "Did you mean" not in message(request), request


def test_a_missing_field_in_an_engines_own_words_has_the_near_one_too() -> None:
    of_engine = {"message": "There must be a prompt.", "param": "prompt", "code": 400}
    body = json.dumps({"error": of_engine}).encode()
    error = json.loads(engine_error(400, body, CHAT, b'{"promt": "x"}'))["error"]
    assert error["message"] == "There must be a prompt. Did you mean `prompt` instead of `promt`?"


def test_several_problems_are_named_up_to_a_bound() -> None:
    fields = "\n  ".join(PROBLEM % f"('body', 'messages', {number})" for number in range(9))
    message = error_of(400, {"detail": f"9 validation errors:\n  {fields}"})["message"]
    assert message == ("messages.0: is missing; messages.1: is missing; messages.2: is missing.")


@pytest.mark.parametrize(
    "place",
    ["('body', 'messages', 0, '%sMessageParam', 'role')", "'body.messages.0.%sMessageParam.role'"],
)
def test_members_of_a_union_are_one_problem(place: str) -> None:
    fields = "\n  ".join(
        PROBLEM % (place % kind) for kind in ("ChatCompletionUser", "ChatCompletionSystem")
    )
    error = error_of(400, {"detail": f"2 validation errors:\n  {fields}"})
    assert (error["message"], error["param"]) == (
        "messages.0.role: is missing.",
        "messages.0.role",
    )


def test_unreadable_problems_keep_the_words_of_the_engine() -> None:
    text = "1 validation error: something else"
    assert error_of(400, {"detail": text})["message"] == text


@pytest.mark.parametrize("body", [b'{"detail":"Not Found"}', b"", b"Not Found"])
@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_a_route_that_an_engine_lacks_is_named_with_a_cure(body: bytes, endpoint: Endpoint) -> None:
    message = error_of(404, body, endpoint)["message"]
    assert message.startswith(
        f"The engine of this model has no {endpoint.method} {endpoint.path}. "
    )
    assert "GET /v1/models" in message


def test_an_unknown_model_of_an_engine_is_no_missing_route() -> None:
    message = "The model `x` does not exist."
    assert error_of(404, {"error": {"message": message}})["message"] == message


def test_an_error_without_words_states_its_status() -> None:
    assert error_of(500, b"")["message"] == "The engine answered with status 500 and no words."


def test_an_error_of_anthropics_form_stays_as_it_is() -> None:
    content = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    assert json.loads(engine_error(529, json.dumps(content).encode(), MESSAGES)) == content


def test_figures_of_an_error_stay_with_it() -> None:
    figures = {"n_prompt_tokens": 5000, "n_ctx": 4096}
    of_engine = {"message": "too long", "type": "exceed_context_size_error", **figures}
    error = error_of(400, {"error": {**of_engine, "object": "error", "data": {"a": 1}}})
    assert error == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
        **figures,
    }


def test_an_error_without_anthropics_object_gets_it() -> None:
    body = json.dumps({"type": "error", "message": "busy"}).encode()
    error = json.loads(engine_error(500, body, MESSAGES))["error"]
    assert error == {"type": "api_error", "message": "busy"}
