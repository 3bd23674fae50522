"""Errors of the admin API as answers: what the gateway raised, what FastAPI found in a request, and
what no route takes."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from gateway.errors import BadRequest, FitserveError, MethodNotAllowed, NotFound
from gateway.proxy.api.protocol import error_headers, request_id


def answer_errors(app: FastAPI) -> None:
    """All errors of `app` have one shape."""
    app.add_exception_handler(FitserveError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


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
        why = f"{first['ctx']['error']} at character {int(first['loc'][-1]) + 1}"
        broken = BadRequest(
            f"The request body is not JSON: {why}.",
            hint="GET /admin/openapi.json describes the request.",
        )
        return await _on_error(request, broken)
    where = ".".join(str(part) for part in first["loc"][1:]) or "body"
    said = first["msg"].removeprefix("Value error, ").rstrip(".")
    bad = BadRequest(
        f"{where}: {said}.", hint="GET /admin/openapi.json describes the request.", param=where
    )
    return await _on_error(request, bad)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    method = request.method
    if error.status_code == 404:
        return await _on_error(
            request,
            NotFound(
                f"There is no {method} {request.url.path[:200]} here.",
                hint="The API is described at /admin/openapi.json.",
            ),
        )
    if error.status_code != 405:
        # FastAPI's, for a body that it cannot read at all: no UTF-8, nested too deeply.
        unread = BadRequest(
            "The request body is not JSON in UTF-8, or nested too deeply.",
            hint="GET /admin/openapi.json describes the request.",
        )
        return await _on_error(request, unread)
    bad = MethodNotAllowed(
        f"{request.url.path[:200]} does not take {method}.",
        hint="The API is described at /admin/openapi.json.",
    )
    response = await _on_error(request, bad)
    response.headers.update(error.headers or {})
    return response
