"""Errors of engines in the form of the client's API.

Engines and their frameworks write errors in several forms: OpenAI's with the status as `code`
(vLLM 0.33.0, entrypoints/serve/exceptions.py), FastAPI's `detail`, and plain text.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.errors import (
    BadRequest,
    FitserveError,
    NotFound,
    RateLimited,
    UpstreamError,
    plain_problem,
)
from gateway.proxy.api.endpoints import Endpoint
from gateway.proxy.api.protocol import anthropic_type, dump
from gateway.proxy.api.request_fields import near_field

# Most bytes shown of an engine's answer that is not JSON.
_EXCERPT_BYTES = 2000
_SERVER_ERROR = 500
# The fields of an error in OpenAI's form.
_FORM_FIELDS = frozenset({"object", "message", "type", "param", "code"})
# The answer of FastAPI and Starlette to a path without a route.
_NO_ROUTE: tuple[Any, ...] = ("Not Found", "")
_TYPES = (
    "api_error",
    "authentication_error",
    "invalid_request_error",
    "not_found_error",
    "permission_error",
    "rate_limit_error",
    "server_error",
    "service_unavailable",
)
# pydantic's list of problems as vLLM prints it: Python's text of dictionaries, whose `loc` is a
# text or a tuple.
_PROBLEMS = re.compile(r"\d{1,6} validation errors?:")
_PROBLEM = re.compile(
    r"""'loc':\ \(?(?P<place>'[^()]{0,300}?)\)?,\ 'msg':\ (?P<quote>["'])(?P<text>.{1,300}?)"""
    r"""(?P=quote)(?=[,}])""",
    re.VERBOSE,
)
_PLACES = re.compile(r"'([^']{1,80})'|(\d{1,6})")
_MAX_PROBLEMS = 3


def engine_error(
    status: int,
    body: bytes | bytearray,
    endpoint: Endpoint,
    request: bytes | bytearray = b"",
) -> bytes:
    """The body of an engine's error for a client of the endpoint, on one line.

    request: the body of the request in JSON, in which a missing field may be misspelt; empty: it
        is not known.
    """
    try:
        content = msgspec.json.decode(body)
    except DECODE_ERRORS:
        content = bytes(body[:_EXCERPT_BYTES]).decode(errors="replace").strip()
    error = _error_object(content)
    if endpoint.shape == "anthropic":
        return dump(_anthropic_envelope(status, content, error, endpoint, request))
    message, param = _message(status, content, error, endpoint)
    message += _misspelt_words(param, request)
    general_error = _general_error(status)
    kind = error.get("type")
    code = error.get("code")
    return dump(
        {
            "error": {
                "message": message,
                "type": kind if kind in _TYPES else general_error.type,
                "param": param,
                "code": code if isinstance(code, str) else None,
            }
            | _figures(error)
        }
    )


def _figures(error: dict[str, Any]) -> dict[str, Any]:
    """Further fields of an engine's error: clients shorten a prompt by such figures."""
    return {
        name: value
        for name, value in error.items()
        if name not in _FORM_FIELDS and isinstance(value, str | int | float)
    }


def _error_object(content: Any) -> dict[str, Any]:
    """The object with the message and its fields; {}: there is none."""
    inner_error = content.get("error") if isinstance(content, dict) else None
    return next(
        (
            part
            for part in (inner_error, content)
            if isinstance(part, dict) and isinstance(part.get("message"), str)
        ),
        {},
    )


def _message(
    status: int, content: Any, error: dict[str, Any], endpoint: Endpoint
) -> tuple[str, str | None]:
    """The words of an error, and the field of the request that they are about."""
    given_param = error.get("param")
    param = given_param.removeprefix("body.") if isinstance(given_param, str) else None
    found_content: Any = error.get("message") or content
    if isinstance(content, dict) and not error:
        found_content = content.get("detail") or content.get("error") or content
    if status == NotFound.status and not error and found_content in _NO_ROUTE:
        missing_route = NotFound(
            f"The engine of this model has no {endpoint.method} {endpoint.path}.",
            hint=_ROUTE_HINTS.get(endpoint.name, _ROUTE_HINT),
        )
        return str(missing_route), None
    text = found_content if isinstance(found_content, str) else dump(found_content).decode()
    if not _PROBLEMS.match(text):
        return text or f"The engine answered with status {status} and no words.", param
    # Each member of a union has the same problem.
    problems = list(dict.fromkeys(_problem(match) for match in _PROBLEM.finditer(text)))
    if not problems:
        return text, param
    words = "; ".join(f"{location}: {problem}" for location, problem in problems[:_MAX_PROBLEMS])
    return f"{words}.", param or problems[0][0]


def _misspelt_words(param: str | None, request: bytes | bytearray) -> str:
    """The words after an error about a field that the request has by a near name; or nothing."""
    if not param or not request or "." in param:
        return ""
    misspelt = near_field(param, request)
    return f" Did you mean `{param}` instead of `{misspelt}`?" if misspelt else ""


def _problem(match: re.Match[str]) -> tuple[str, str]:
    """The field of one of pydantic's problems, and its words."""
    # Fields have lower case; a name with a capital is the class of a union's member.
    names = ".".join(name or number for name, number in _PLACES.findall(match["place"]))
    location = (
        ".".join(name for name in names.split(".") if not name[:1].isupper())
        .removeprefix("body.")
        .removeprefix("body")
        or "body"
    )
    return location, plain_problem(match["text"]).rstrip(".")


_ROUTE_HINT = "Another kind of model has it; GET /v1/models lists the task of each model."
_ROUTE_HINTS = {
    "speech": "Only a model that speaks has it, and GET /v1/models lists the task of each model."
    " Text is answered by /v1/chat/completions.",
}


def _general_error(status: int) -> type[FitserveError]:
    """The gateway's own error of the status, whose type is also that of the engine's."""
    if status == RateLimited.status:
        return RateLimited
    return BadRequest if status < _SERVER_ERROR else UpstreamError


def _anthropic_envelope(
    status: int,
    content: Any,
    error: dict[str, Any],
    endpoint: Endpoint,
    request: bytes | bytearray,
) -> dict[str, Any]:
    is_envelope = isinstance(content, dict) and content.get("type") == "error"
    if is_envelope and content.get("error") is error and "type" in error:
        return dict(content)
    message, param = _message(status, content, error, endpoint)
    message += _misspelt_words(param, request)
    return {"type": "error", "error": {"type": anthropic_type(status), "message": message}}
