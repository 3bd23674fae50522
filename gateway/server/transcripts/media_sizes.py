"""Values of JSON without media and vectors, in whose place their sizes stand. Pure."""

from __future__ import annotations

import re
from typing import Any

_DATA_URL = re.compile(r"data:([\w.+/-]{0,100})[^,]{0,100};base64,")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{512,}={0,2}")
_VECTOR_NUMBERS = 32


def drop_media(value: Any) -> Any:
    """The value with sizes in place of images, sounds, files and vectors."""
    if isinstance(value, str):
        return _text_without_media(value)
    if isinstance(value, dict):
        return {name: drop_media(member) for name, member in value.items()}
    if isinstance(value, list):
        if len(value) > _VECTOR_NUMBERS and all(isinstance(item, int | float) for item in value):
            return f"[{len(value):,} numbers]"
        return [drop_media(item) for item in value]
    return value


def _text_without_media(text: str) -> str:
    if match := _DATA_URL.match(text):
        return f"[{match[1] or 'media'}: {_decoded_bytes(len(text) - match.end()):,} bytes]"
    if _BASE64.fullmatch(text):
        return f"[base64: {_decoded_bytes(len(text)):,} bytes]"
    return text


def _decoded_bytes(characters: int) -> int:
    return characters * 3 // 4
