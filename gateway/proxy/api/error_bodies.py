"""Errors as the description of the API (OpenAPI 3.1) has them: their bodies, and which statuses a
call answers with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.errors import FitserveError


def _kinds(kind: type[FitserveError] = FitserveError) -> Iterable[type[FitserveError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)


_TEXT = {"type": "string"}
# By the name of the schema: as `FitserveError.envelope` and `gateway.proxy.api.protocol.envelope`
# make them.
ERROR_SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": {
        "type": "object",
        "description": "What went wrong, why, and what to do next, in OpenAI's shape.",
        "required": ["error"],
        "additionalProperties": False,
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "additionalProperties": False,
                "properties": {
                    "message": _TEXT,
                    "type": {"enum": sorted({kind.type for kind in _kinds()})},
                    "param": {"type": ["string", "null"], "description": "the field that is meant"},
                    "code": {"enum": sorted({kind.code for kind in _kinds()})},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "description": "The same in Anthropic's shape; errors of engines are brought into it.",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
        },
    },
    "EngineError": {
        "description": (
            "Where `x-gateway-source` says `gateway`, an error of the gateway; else what the engine"
            " said, as it is."
        ),
        "anyOf": [{"$ref": "#/components/schemas/Error"}, {}],
    },
}


def errors(*kinds: type[FitserveError], schema: str = "Error") -> dict[int | str, dict[str, Any]]:
    """The responses of a route that answers with these, by status."""
    by_status: dict[int, list[type[FitserveError]]] = {}
    for kind in kinds:
        by_status.setdefault(kind.status, []).append(kind)
    return {
        status: {
            "description": " ".join(
                f"`{kind.code}`: {(kind.__doc__ or '').partition('.')[0]}." for kind in found
            ),
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
        }
        for status, found in by_status.items()
    }
