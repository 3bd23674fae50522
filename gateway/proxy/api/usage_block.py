"""The usage block of an answer, as msgspec reads it. Not compiled, like `request_fields`."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from gateway.decoding import DECODE_ERRORS

_Count = Annotated[int, msgspec.Meta(ge=0, lt=10**12)]


class PromptDetails(msgspec.Struct, gc=False):
    """Details of the prompt in OpenAI's form."""

    cached_tokens: _Count | None = None


class UsageBlock(msgspec.Struct, gc=False):
    """Usage block in OpenAI's form."""

    prompt_tokens: _Count
    completion_tokens: _Count
    prompt_tokens_details: PromptDetails | None = None


class UsageTail(msgspec.Struct, gc=False):
    """The end of an answer, from its usage block on."""

    usage: UsageBlock


# JSON has a quote within a string only after a backslash, so this is a name, wherever it stands.
_NAME = re.compile(rb'"usage"\s*:')
_EVENT_END = re.compile(rb"\r?\n\r?\n|\r\r")
# Names looked at, from the last one on.
_MAX_NAMES = 32
# The text before the name, so that the rest completes an object: an answer or event, and an
# event with the response in a field.
_BLOCK_PREFIXES = (b"{", b'{"response":{')
_COUNT_LIMIT = 10**12


def structured_usage(data: bytes) -> tuple[int | None, int | None, int | None]:
    """Tokens of the prompt, of the answer and of the prompt from a cache, by the start of the usage
    block in the JSON at the end of `data`, of which the beginning may be missing."""
    starts = [match.start() for match in _NAME.finditer(data)][-_MAX_NAMES:]
    for prefix in _BLOCK_PREFIXES:
        for start in reversed(starts):
            end = _EVENT_END.search(data, start)
            block_text = data[start : end.start() if end else len(data)]
            try:
                answer = msgspec.json.decode(prefix + block_text)
            except DECODE_ERRORS:
                continue
            holder = answer if prefix == b"{" else answer.get("response")
            block = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(block, dict):
                return _token_counts(block)
    return None, None, None


def _token_counts(block: dict[str, Any]) -> tuple[int | None, int | None, int | None]:
    prompt = _token_count(block, "prompt_tokens", "input_tokens")
    completion = _token_count(block, "completion_tokens", "output_tokens")
    # Anthropic counts tokens from a cache in addition to `input_tokens`; OpenAI counts them within
    # the prompt.
    read, created_tokens = (
        _token_count(block, f"cache_{kind}_input_tokens") for kind in ("read", "creation")
    )
    details = block.get("prompt_tokens_details", block.get("input_tokens_details"))
    cached_tokens = _token_count(details, "cached_tokens") if isinstance(details, dict) else read
    return (
        None if prompt is None else prompt + (read or 0) + (created_tokens or 0),
        completion,
        cached_tokens,
    )


def _token_count(block: dict[str, Any], *names: str) -> int | None:
    """The first of these fields that is a number of tokens."""
    for name in names:
        value = block.get(name)
        if type(value) is int and 0 <= value < _COUNT_LIMIT:
            return value
    return None
