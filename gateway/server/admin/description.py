"""GET /admin/openapi.json: what every route takes and answers, its errors too, and which scope it
needs; inference as the table of endpoints has it.

A route names the errors of its own (`responses=errors(NotFound)`). What every request can be told
is added here.
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

# What every request to a route can be told; without a key only the first four.
_COMMON = errors(
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
_OPEN = (400, 408, 431, 503)
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
# Of their own, or of engines; by the shape of the API.
_OF_SHAPE = {
    shape: errors(*_INFERENCE, schema=schema)
    for shape, schema in (("openai", "EngineError"), ("anthropic", "AnthropicError"))
}
# FastAPI's own words for what `gateway.server.app` answers with 400.
_UNUSED = ("HTTPValidationError", "ValidationError")
_ASKED = {
    "type": "object",
    "description": "As the engine takes it; what is beside `model` is passed on unread.",
    "required": ["model"],
    "properties": {"model": {"type": "string"}},
}
# Beside the table, as `gateway.proxy.api.endpoints.find` reads them.
_BELOW = (
    Endpoint("models", "GET", "/v1/models/{id}", frozenset(), body="none", at="models"),
    Endpoint("responses", "GET", "/v1/responses/{id}", frozenset(), body="none", at="id"),
    Endpoint("responses", "POST", "/v1/responses/{id}/cancel", frozenset(), body="none", at="id"),
)


def description(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1."""
    api = get_openapi(title=app.title, version=app.version, routes=app.routes)
    scopes = {
        (method.lower(), path.replace(":path}", "}")): scope
        for (method, path), scope in SCOPES.items()
    }
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            scope = scopes[method, path]
            own = {
                status: said
                for status, said in operation["responses"].items()
                if not _of_fastapi(said)
            }
            common = {
                str(status): _ref("responses", f"every-{status}")
                for status in (_OPEN if scope == "open" else _COMMON)
            }
            operation |= {
                "responses": common | own,
                "security": [] if scope == "open" else [{"key": [scope]}],
            }
    for endpoint in (*ENDPOINTS, *_BELOW):
        api["paths"].setdefault(endpoint.path, {})[endpoint.method.lower()] = _inference(endpoint)
    named = {"every": _COMMON, **_OF_SHAPE}
    api["components"] |= {
        "schemas": (
            {
                name: said
                for name, said in api["components"]["schemas"].items()
                if name not in _UNUSED
            }
            | ERROR_SCHEMAS
        ),
        "responses": {
            f"{name}-{status}": said
            for name, told in named.items()
            for status, said in told.items()
        },
        "securitySchemes": {
            "key": {
                "type": "http",
                "scheme": "bearer",
                "description": "Needed once the gateway has a key.",
            }
        },
    }
    return api


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _of_fastapi(response: dict[str, Any]) -> bool:
    schemas = (content.get("schema", {}) for content in response.get("content", {}).values())
    return _ref("schemas", _UNUSED[0]) in schemas


def _inference(endpoint: Endpoint) -> dict[str, Any]:
    ours = endpoint.at == "models"
    kinds = ["application/json"] if ours else ["application/json", "text/event-stream", "*/*"]
    operation: dict[str, Any] = {
        "tags": ["inference"],
        "description": (
            "The models that the key may ask."
            if ours
            else "Passed on to an engine of the model; its answer comes as it is."
        ),
        "responses": {
            "200": {"description": "The answer", "content": {kind: {} for kind in kinds}},
            **{
                str(status): _ref("responses", f"{endpoint.shape}-{status}")
                for status in _OF_SHAPE[endpoint.shape]
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
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": _ASKED}}}
    return operation
