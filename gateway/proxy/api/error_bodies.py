"""Errors in the OpenAPI description: their bodies, and the statuses of each call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.errors import FitserveError


def _kinds(kind: type[FitserveError] = FitserveError) -> Iterable[type[FitserveError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _kinds(subclass)


_TEXT = {"type": "string"}
# Schemas by name. `FitserveError.envelope` and `gateway.proxy.api.protocol.envelope` make
# these bodies.
ERROR_SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": {
        "type": "object",
        "description": "The error, its cause and a remedy, in OpenAI's form.",
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
                    "param": {
                        "type": ["string", "null"],
                        "description": "the field with the error",
                    },
                    "code": {"enum": sorted({kind.code for kind in _kinds()})},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "description": "The same in Anthropic's form, also for errors of engines.",
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
            "An error of the gateway if `x-gateway-source` is `gateway`. Otherwise the engine's own"
            " words in the same form."
        ),
        "anyOf": [{"$ref": "#/components/schemas/Error"}, {}],
    },
}


def errors(*kinds: type[FitserveError], schema: str = "Error") -> dict[int | str, dict[str, Any]]:
    """The responses of a route for these errors, by status."""
    kinds_by_status: dict[int, list[type[FitserveError]]] = {}
    for kind in kinds:
        kinds_by_status.setdefault(kind.status, []).append(kind)
    return {
        status: {
            "description": " ".join(
                f"`{kind.code}`: {(kind.__doc__ or '').partition('.')[0]}." for kind in group
            ),
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
        }
        for status, group in kinds_by_status.items()
    }
