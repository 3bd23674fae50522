"""Lines of an engine inside records of other programs, in JSON or logfmt. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_RECORD_STARTS = (b'{"', b"time=", b"ts=", b"level=")
_TEXT = rb"(?P<text>(?:[^\"\\]|\\.)*)(?:\"|\\?$)"
_JSON = re.compile(rb"\"(?:log|message|msg|text|MESSAGE)\": ?\"" + _TEXT)
# Fields of a record that no answer to a client has.
_RECORD = re.compile(
    rb"\"(?:@?time(?:stamp)?|ts|asctime|stream|level(?:name)?|severity|__REALTIME_TIMESTAMP)\": ?"
)
_LOGFMT = re.compile(rb" msg=\"" + _TEXT)
# A message of the carrier itself.
_ERROR_FIELD = re.compile(rb" err(?:or)?=")
_ESCAPE = re.compile(r"\\(?:u(?P<u>[0-9a-fA-F]{4})|x(?P<x>[0-9a-fA-F]{2})|(?P<one>.))")
_ESCAPE_LETTERS = {"n": "\n", "t": "\t", "r": "", "b": "", "f": ""}


def carried_lines(raw: bytes) -> Sequence[bytes]:
    """The lines inside a line of a log: the line itself if it is not a record."""
    if not raw.startswith(_RECORD_STARTS):
        return (raw,)
    if raw.startswith(b"{"):
        match = _JSON.search(raw) if _RECORD.search(raw) else None
    else:
        match = None if _ERROR_FIELD.search(raw) else _LOGFMT.search(raw)
    if match is None:
        return (raw,)
    text = _ESCAPE.sub(_unescaped_character, match["text"].decode("utf-8", "replace"))
    return text.removesuffix("\n").encode("utf-8", "replace").split(b"\n")


def _unescaped_character(match: re.Match[str]) -> str:
    code = match["u"] or match["x"]
    if code:
        return chr(int(code, 16))
    return _ESCAPE_LETTERS.get(match["one"], match["one"])
