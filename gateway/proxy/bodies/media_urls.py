"""The media of a request that an engine would fetch: their URLs and paths.

vLLM takes `image_url`, `video_url` and `audio_url` (0.18.0 to 0.33.0, entrypoints/chat_utils.py),
SGLang also plain texts under `image`, of which it opens paths (0.5.10 to 0.5.23, `load_image` of
srt/utils/common.py). So every text under a field that can hold media counts.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.errors import BadRequest

# A body with neither has no media to fetch. SGLang reads a text without such a slash
# only as a file in the engine's own folder.
_MARK = re.compile(rb'/(?:(?<=[:"./]/)|\.\.)').search
_ESCAPE = re.compile(rb"\\[u/]").search
_SLASH, _BACKSLASH = b"/\\"
_STEMS = ("image", "audio", "video")
# Fields that engines pass on as data, without fetching anything.
_INERT_FIELDS = frozenset(
    (
        "functions",
        "metadata",
        "response_format",
        "structured_outputs",
        "tool_choice",
        "chat_template_kwargs",
        "guided_json",
        "tools",
    )
)
# Fields at any depth that describe the work of tools and earlier answers.
_HISTORY = frozenset(("action", "annotations", "arguments", "citations"))
# The same of parts by their type.
_INERT_BY_TYPE = {
    **dict.fromkeys(("tool_use", "server_tool_use"), _HISTORY | {"input"}),
    **dict.fromkeys(("search_result", "url_citation", "web_search_result"), _HISTORY | {"url"}),
}
_NO_FIELDS: frozenset[str] = frozenset()
# Texts next to a medium that describe it.
_WORDS = frozenset(
    (
        "caption",
        "cache_control",
        "detail",
        "filename",
        "format",
        "id",
        "media_type",
        "mime_type",
        "name",
        "text",
        "title",
        "type",
        "uuid",
    )
)
_BASE64 = re.compile(r"(?!/(?!9j/))[A-Za-z0-9+/_=\s-]*")
_URL = re.compile(r"https?://[!-\[\]-~]+", re.IGNORECASE)
_MAX_HOSTS = 32
_EXCERPT = 60


def hosts(body: bytes | bytearray) -> frozenset[str]:
    """The hosts that an engine would fetch media from.

    Raises BadRequest for a path, for a URL that is not http or https or names no host, and for a
    value that cannot be read.
    """
    # The search for a byte by its number takes nanoseconds; for a text it raises an error first.
    if (_SLASH not in body or not _MARK(body)) and (_BACKSLASH not in body or not _ESCAPE(body)):
        return frozenset()
    document = _decode_fields(body)
    if not isinstance(document, dict):
        return frozenset()
    names: set[str] = set()
    waiting_values: list[tuple[Any, bool]] = [
        (value, _holds_media(name)) for name, value in document.items() if name not in _INERT_FIELDS
    ]
    while waiting_values:
        value, is_media = waiting_values.pop()
        if isinstance(value, dict):
            # Below a medium, engines read a URL whatever type is next to it.
            inert = _NO_FIELDS if is_media else _inert_fields(value.get("type"))
            waiting_values.extend(
                (inner_value, _holds_media(name) or (is_media and name not in _WORDS))
                for name, inner_value in value.items()
                if name not in inert
            )
        elif isinstance(value, list):
            waiting_values.extend((inner_value, is_media) for inner_value in value)
        elif is_media and isinstance(value, str) and (host := _host(value)) is not None:
            names.add(host)
    if len(names) > _MAX_HOSTS:
        raise BadRequest(
            f"The request names {len(names)} hosts of media; {_MAX_HOSTS} may be named.",
            hint="Send the media as data: URLs.",
        )
    return frozenset(names)


def host_error(host: str) -> BadRequest:
    return BadRequest(
        f"Media of the host '{host[:_EXCERPT]}' are not fetched: its address is not public or not"
        " known, or the gateway does not allow it.",
        hint=(
            "Send the media as a data: URL, or ask the operator to add the host to"
            " FITSERVE_MEDIA_HOSTS."
        ),
    )


def _decode_fields(body: bytes | bytearray) -> Any:
    """The values of a body of which only the fields were read so far. Raises BadRequest."""
    try:
        return msgspec.json.decode(body)
    except DECODE_ERRORS as error:
        raise BadRequest(
            f"A value of the request body cannot be read ({str(error)[:_EXCERPT]}).",
            hint="Send JSON with numbers of at most 64 bits and a depth of at most 900.",
        ) from None


def _inert_fields(kind: Any) -> frozenset[str]:
    return _INERT_BY_TYPE.get(kind, _HISTORY) if isinstance(kind, str) else _HISTORY


def _holds_media(name: str) -> bool:
    low = name.lower()
    return low == "url" or low.endswith("_url") or any(stem in low for stem in _STEMS)


def _host(text: str) -> str | None:
    """The host of a URL; None: the text is the medium itself. Raises BadRequest."""
    if text[:5].lower() == "data:" or _BASE64.fullmatch(text):
        return None
    if _URL.fullmatch(text):
        try:
            url_parts = urlsplit(text)
            host = url_parts.hostname
            if host and "@" not in url_parts.netloc and "%" not in url_parts.netloc:
                return host
        except ValueError:
            pass
    raise BadRequest(
        f"The medium {text[:_EXCERPT]!r} is not fetched: it is not an http or https URL with a "
        "plain host name, and no data.",
        hint="Send the medium as a data: URL, or by an http or https URL.",
    )
