"""The field `model` of a multipart/form-data body: as much of RFC 7578 as it takes to find it; the file beside it is not looked at."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.errors import BadRequest

# Clients that send the fields before the file are passed on as soon as this much of the body is here.
PREFIX_BYTES = 64 * 1024

_BOUNDARY = re.compile(rb"multipart/form-data\s*;.*?boundary=(\"?)([0-9A-Za-z'()+_,./:=?-]{1,70})\1\s*(?:;|$)", re.IGNORECASE)
_MODEL = re.compile(rb"^content-disposition\s*:\s*form-data\s*;(?:[^\r\n]*;)?\s*name=(\"?)model\1\s*(?:;|\r|$)", re.I | re.M)


@dataclass(frozen=True, slots=True)
class Field:
    """The value, and where it is in the body."""

    value: str
    start: int
    end: int


def boundary_of(content_type: bytes | None) -> bytes:
    """Raises BadRequest."""
    match = _BOUNDARY.fullmatch(content_type or b"")
    if match is None:
        raise BadRequest("The request body is no form.", hint="Send multipart/form-data with a boundary.")
    return match[2]


def find_model(body: bytes | bytearray, boundary: bytes) -> Field | None:
    """The field in what is here of the body; None while it is not complete. Of a repeated one the last counts, as in the engines.

    Raises BadRequest where this is no form.
    """
    found = None
    line = b"--" + boundary
    if not body.startswith(line[: len(body)]):
        raise BadRequest("The form does not start with its boundary.", hint="Check how the client writes multipart/form-data.")
    at = len(line)
    while (start := body.find(b"\r\n\r\n", at)) >= 0:
        end = body.find(b"\r\n" + line, start + 4)
        if end < 0:
            break
        if _MODEL.search(body, at, start + 2):
            try:
                found = Field(bytes(body[start + 4 : end]).decode(), start + 4, end)
            except UnicodeDecodeError:
                raise BadRequest("`model` is not UTF-8.", hint="Send its name as text.", param="model") from None
        at = end + 2 + len(line)
        if body.startswith(b"--", at):
            break
    return found
