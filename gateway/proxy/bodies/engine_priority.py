"""The priority of a request in its body, for engines that order their own queue by it."""

from __future__ import annotations

import re

import msgspec

from gateway.proxy.api.protocol import read_fields

# Endpoints whose requests have the field. Source: `priority` in vllm/entrypoints (0.26.0, 0.33.0)
# and in srt/entrypoints/openai/protocol.py of SGLang 0.5.23.
ENDPOINTS = frozenset({"chat", "completions", "responses", "embeddings"})
_NUMBER = re.compile(rb"-?[0-9]{1,9}").fullmatch


def has_no_priority(body: bytes | bytearray) -> bool:
    """Whether a body surely has no such field. Escaped letters may spell it."""
    return b'"priority"' not in body and b"\\u" not in body


def set_priority(body: bytes | bytearray, priority: int, factor: int) -> bytes:
    """The body with its priority. A client may lower its request further, and never raise it.
    Raises BadRequest.

    priority: a smaller number goes first.
    factor: 1 where the same holds at the engine, else -1.
    """
    fields = read_fields(body)
    own_value = bytes(fields.get("priority", b""))
    if _NUMBER(own_value):
        priority = max(priority, factor * int(own_value))
    return msgspec.json.encode({**fields, "priority": factor * priority})
