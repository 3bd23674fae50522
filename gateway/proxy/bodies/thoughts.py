"""One name for the thoughts of a chat answer, whatever engine serves: `reasoning`.

vLLM names them `reasoning` (0.18.0 to 0.33.0, entrypoints/openai/chat_completion/protocol.py),
SGLang `reasoning_content` (0.5.10 to 0.5.23, srt/entrypoints/openai/protocol.py), and neither has
an option for it. The new key has as many bytes as the old one, so lengths and chunks stay.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.proxy.api.protocol import read_fields

OTHER_NAME = "reasoning_content"
NAME = "reasoning"
# Text of models cannot match: JSON escapes its quotes.
_OTHER_KEY = b'"%b":' % OTHER_NAME.encode()
_KEY = (b'"%b":' % NAME.encode()).ljust(len(_OTHER_KEY))
_QUOTED_NAME = b'"%b"' % NAME.encode()


def rename_thoughts(data: bytes) -> tuple[bytes, bytes]:
    """Bytes of an answer with the thoughts under their usual name, and the beginning of a key at
    their end, which belongs before the next bytes."""
    if _OTHER_KEY in data:
        data = data.replace(_OTHER_KEY, _KEY)
    if data.endswith(_OTHER_KEY[:-1]):
        start = len(data) - len(_OTHER_KEY) + 1
    else:
        start = data.rfind(b'"', max(0, len(data) - len(_OTHER_KEY)))
        if start < 0 or not _OTHER_KEY.startswith(data[start:]):
            return data, b""
    return data[:start], data[start:]


def rename_for_engine(body: bytes | bytearray) -> bytes | bytearray:
    """A request for an engine with the other name: thoughts of earlier answers get that name."""
    if _QUOTED_NAME not in body:
        return body
    fields = read_fields(body)
    try:
        messages = msgspec.json.decode(fields.get("messages", b"null"))
    except DECODE_ERRORS:
        return body
    are_changed = [_rename(message) for message in messages] if isinstance(messages, list) else []
    if not any(are_changed):
        return body
    return msgspec.json.encode({**fields, "messages": messages})


def _rename(message: Any) -> bool:
    """Give the message's thoughts the engine's name. Returns whether it has any."""
    if not isinstance(message, dict) or not isinstance(message.get(NAME), str):
        return False
    message.setdefault(OTHER_NAME, message.pop(NAME))
    return True
