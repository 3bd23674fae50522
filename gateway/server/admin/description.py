"""GET /admin/openapi.json: requests, answers, errors and scope of every route.

A route names its own errors (`responses=errors(NotFound)`); errors that any request may get are
added here. Inference is described from the table of endpoints.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.errors import (
    BadRequest,
    Busy,
    FitserveError,
    Forbidden,
    HeadTooLarge,
    ModelNotFound,
    NotFound,
    NotReady,
    Overloaded,
    RateLimited,
    TooLarge,
    TooSlow,
    Unauthorized,
    UpstreamError,
)
from gateway.proxy.access.scopes import SCOPES
from gateway.proxy.api.endpoints import ENDPOINTS, Endpoint
from gateway.proxy.api.error_bodies import ERROR_SCHEMAS, errors

# Errors that any request to a route may get; without a key only the first four.
_COMMON_ERRORS = errors(
    BadRequest,
    TooSlow,
    HeadTooLarge,
    Busy,
    NotReady,
    TooLarge,
    Unauthorized,
    Forbidden,
    RateLimited,
)
_OPEN_STATUSES = (400, 408, 431, 503)
_INFERENCE: tuple[type[FitserveError], ...] = (
    BadRequest,
    Unauthorized,
    Forbidden,
    NotFound,
    ModelNotFound,
    TooSlow,
    TooLarge,
    HeadTooLarge,
)
_INFERENCE += (RateLimited, Overloaded, UpstreamError, NotReady, Busy)
# Errors of the gateway or of engines, by the form of the API.
_ERRORS_OF_SHAPE = {
    shape: errors(*_INFERENCE, schema=schema)
    for shape, schema in (("openai", "EngineError"), ("anthropic", "AnthropicError"))
}
# FastAPI's own schemas of errors, which `gateway.server.error_answers` replaces.
_UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")
_REQUEST = {
    "type": "object",
    "description": "The engine's request format; only `model` is read here, other fields pass.",
    "required": ["model"],
    "properties": {"model": {"type": "string"}},
}
# Endpoints outside the table, as `gateway.proxy.api.endpoints.find` reads them.
_BELOW = (
    Endpoint("models", "GET", "/v1/models/{id}", frozenset(), body="none", destination="models"),
    Endpoint("responses", "GET", "/v1/responses/{id}", frozenset(), body="none", destination="id"),
    Endpoint(
        "responses", "POST", "/v1/responses/{id}/cancel", frozenset(), body="none", destination="id"
    ),
)


def description(app: FastAPI) -> dict[str, Any]:
    """The description of `app` in OpenAPI 3.1."""
    api = get_openapi(title=app.title, version=app.version, routes=app.routes)
    scopes = {
        (method.lower(), path.replace(":path}", "}")): scope
        for (method, path), scope in SCOPES.items()
    }
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            scope = scopes[method, path]
            specific = {
                status: response
                for status, response in operation["responses"].items()
                if not _is_fastapi_response(response)
            }
            common_answers = {
                str(status): _ref("responses", f"every-{status}")
                for status in (_OPEN_STATUSES if scope == "open" else _COMMON_ERRORS)
            }
            operation |= {
                "responses": common_answers | specific,
                "security": [] if scope == "open" else [{"key": [scope]}],
            }
    for endpoint in (*ENDPOINTS, *_BELOW):
        api["paths"].setdefault(endpoint.path, {})[endpoint.method.lower()] = _inference(endpoint)
    groups = {"every": _COMMON_ERRORS, **_ERRORS_OF_SHAPE}
    api["components"] |= {
        "schemas": (
            {
                name: response
                for name, response in api["components"]["schemas"].items()
                if name not in _UNUSED_SCHEMAS
            }
            | ERROR_SCHEMAS
        ),
        "responses": {
            f"{name}-{status}": response
            for name, responses in groups.items()
            for status, response in responses.items()
        },
        "securitySchemes": {
            "key": {
                "type": "http",
                "scheme": "bearer",
                "description": "Required once the gateway has a key.",
            }
        },
    }
    return api


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _is_fastapi_response(response: dict[str, Any]) -> bool:
    schemas = (content.get("schema", {}) for content in response.get("content", {}).values())
    return _ref("schemas", _UNUSED_SCHEMAS[0]) in schemas


def _inference(endpoint: Endpoint) -> dict[str, Any]:
    """The OpenAPI description of an inference call."""
    is_own = endpoint.destination == "models"
    kinds = ["application/json"] if is_own else ["application/json", "text/event-stream", "*/*"]
    operation: dict[str, Any] = {
        "tags": ["inference"],
        "description": (
            "The models that the key may use."
            if is_own
            else "Passed on to an engine of the model, whose answer is unchanged."
        ),
        "responses": {
            "200": {"description": "The answer", "content": {kind: {} for kind in kinds}},
            **{
                str(status): _ref("responses", f"{endpoint.shape}-{status}")
                for status in _ERRORS_OF_SHAPE[endpoint.shape]
            },
        },
        "security": [{"key": ["inference"]}],
    }
    if "{id}" in endpoint.path:
        operation["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if endpoint.body != "none":
        kind = "application/json" if endpoint.body == "json" else "multipart/form-data"
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": _REQUEST}}}
    return operation
