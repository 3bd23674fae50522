"""Errors of the admin API as answers: of the gateway, of FastAPI, and of unknown routes."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from gateway.disk_fault import DISK_ERRORS, unwritten
from gateway.errors import BadRequest, FitserveError, MethodNotAllowed, NotFound
from gateway.proxy.api.protocol import error_headers, request_id

_DESCRIPTION = (
    "GET /admin/openapi.json describes the API, `fitserve COMMAND --help` the options of a command."
)


def answer_errors(api: FastAPI) -> None:
    """Gives all errors of `api` one form."""
    api.add_exception_handler(FitserveError, _on_error)
    api.add_exception_handler(RequestValidationError, _on_invalid)
    api.add_exception_handler(HTTPException, _on_http)
    api.add_exception_handler(OSError, _on_disk)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, FitserveError):
        raise error
    headers = {"x-gateway-source": "gateway", "x-request-id": request_id(request.scope)}
    more = {name.decode(): value.decode() for name, value in error_headers(error)}
    return JSONResponse(error.envelope(), error.status, headers | more)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = f"{first['ctx']['error']} at character {int(first['loc'][-1]) + 1}"
        broken = BadRequest(
            f"The request body is not JSON: {reason}.",
            hint=_DESCRIPTION,
        )
        return await _on_error(request, broken)
    field = ".".join(str(part) for part in first["loc"][1:]) or "body"
    problem = first["msg"].removeprefix("Value error, ").rstrip(".")
    bad = BadRequest(f"{field}: {problem}.", hint=_DESCRIPTION, param=field)
    return await _on_error(request, bad)


async def _on_disk(request: Request, error: Exception) -> JSONResponse:
    """The answer for a file that could not be written; any other error is a bug."""
    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS or not error.filename:
        raise error
    path = Path(os.fsdecode(error.filename))
    return await _on_error(
        request, unwritten(f"{path} could not be written", path.parent, error, "")
    )


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    method = request.method
    if error.status_code == 404:
        return await _on_error(
            request,
            NotFound(
                f"The route {method} {request.url.path[:200]} does not exist.",
                hint=_DESCRIPTION,
            ),
        )
    if error.status_code != 405:
        # FastAPI's error for an unreadable body: no UTF-8, or nested too deeply.
        unread = BadRequest(
            "The request body is not JSON in UTF-8, or nested too deeply.",
            hint=_DESCRIPTION,
        )
        return await _on_error(request, unread)
    bad = MethodNotAllowed(
        f"{request.url.path[:200]} does not accept {method}.",
        hint=_DESCRIPTION,
    )
    response = await _on_error(request, bad)
    response.headers.update(error.headers or {})
    return response
