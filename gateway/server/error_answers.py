"""Errors of the admin API as answers: of the gateway, of FastAPI, and of unknown routes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from gateway.disk_fault import write_error
from gateway.domain.value import first_field_problem
from gateway.errors import (
    BadRequest,
    FitserveError,
    MethodNotAllowed,
    no_route_error,
)
from gateway.proxy.api.endpoints import lacks_prefix
from gateway.proxy.api.foreign_routes import foreign_hint
from gateway.proxy.api.protocol import error_headers, request_id

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_DESCRIPTION = (
    "GET /admin/openapi.json describes the API, `fitserve COMMAND --help` the options of a command."
)
_BASE_URL = "The base URL of a client ends in /v1 here."


def answer_errors(api: FastAPI) -> None:
    """Give all errors of `api` one form."""
    api.add_exception_handler(FitserveError, _answer_error)
    api.add_exception_handler(RequestValidationError, _answer_invalid)
    api.add_exception_handler(HTTPException, _answer_http_error)
    api.add_exception_handler(OSError, _answer_disk_error)
    for kind in (UnicodeEncodeError, PydanticSerializationError):
        api.add_exception_handler(kind, _answer_half_character)


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, FitserveError):
        raise error
    headers = {"x-gateway-source": "gateway", "x-request-id": request_id(request.scope)}
    extra_headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return JSONResponse(error.envelope(), error.status, headers | extra_headers)


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = f"{first['ctx']['error']} at character {int(first['loc'][-1]) + 1}"
        broken = BadRequest(
            f"The request body is not JSON: {reason}.",
            hint=_DESCRIPTION,
        )
        return await _answer_error(request, broken)
    # The first part of a location is that of the request, such as `body` or `query`.
    problems = [{**problem, "loc": tuple(problem["loc"])[1:]} for problem in error.errors()]
    fields = _body_fields(request) if first["loc"][0] == "body" else {}
    field, words = first_field_problem(problems, fields)
    field, problem = field or "body", words.rstrip(".")
    bad_request = BadRequest(f"{field}: {problem}.", hint=_DESCRIPTION, param=field)
    return await _answer_error(request, bad_request)


def _body_fields(request: Request) -> Mapping[str, Any]:
    """The fields of the route's body; empty: the route reads none."""
    body = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(body, "field_info", None), "annotation", None)
    fields: Mapping[str, Any] = getattr(model, "model_fields", {})
    return fields


async def _answer_disk_error(request: Request, error: Exception) -> JSONResponse:
    """The answer for a file that could not be written; any other error is a bug."""
    refusal = write_error(error) if isinstance(error, OSError) else None
    if refusal is None:
        raise error
    return await _answer_error(request, refusal)


async def _answer_half_character(request: Request, error: Exception) -> JSONResponse:
    """The answer for a text with half of a character (a lone surrogate), which JSON can write and
    nothing can store. Any other error is a bug."""
    if not _SURROGATE.search(await request.body()):
        raise error
    bad_request = BadRequest(
        "A text of the request body has half of a character, such as \\ud83d. Nothing was changed.",
        hint="Send each character whole, in UTF-8 or as both of its escapes.",
    )
    return await _answer_error(request, bad_request)


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    method = request.method
    if error.status_code == 404:
        path = request.url.path
        general_hint = _BASE_URL if lacks_prefix(path) else _DESCRIPTION
        hint = foreign_hint(path) or general_hint
        return await _answer_error(request, no_route_error(method, path, hint))
    if error.status_code != 405:
        # FastAPI's error for an unreadable body: no UTF-8, or nested too deeply.
        unread_request = BadRequest(
            "The request body is not JSON in UTF-8, or nested too deeply.",
            hint=_DESCRIPTION,
        )
        return await _answer_error(request, unread_request)
    error_answer = MethodNotAllowed(
        f"{request.url.path[:200]} does not accept {method}.",
        hint=_DESCRIPTION,
    )
    response = await _answer_error(request, error_answer)
    response.headers.update(error.headers or {})
    return response
