"""The field `model` of a multipart/form-data body, read while the body passes.

The form is read as python-multipart reads it, which the engines use. A key for one model must not
reach another one because two readers of forms disagree. So ambiguous forms are refused:

    a repeated field, or a field with a file name or an encoding
    a name similar to `model`, or a part that is not a plain `form-data`
    bytes around a delimiter, or outside the first and last delimiter

The whole form is read, also where part of it already went to an engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from gateway.errors import BadRequest

# A form with its fields before the file is passed on once this many bytes have arrived.
PREFIX_BYTES = 64 * 1024

_BOUNDARY = re.compile(
    rb"multipart/form-data\s*;.*?boundary=(\"?)([0-9A-Za-z'()+_,./:=?-]{1,70})\1\s*(?:;|$)",
    re.IGNORECASE,
)
_TOKEN = rb"[0-9A-Za-z._\[\]-]{1,256}"
_QUOTED_STRING = rb'"[^"\\\x00-\x1f\x7f]{0,1024}"'
# Forms of this header in use: browsers escape a quote as %22, .NET quotes nothing, and older .NET
# adds filename*, which no engine reads.
_DISPOSITION = re.compile(
    rb"form-data;[ ]?name=(?P<name>%b|%b)(?P<file>(?:;[ ]?filename=(?:%b|%b))?(?:;["
    rb" ]?filename\*=[!#-~]{1,1024})?)" % (_TOKEN, _QUOTED_STRING, _TOKEN, _QUOTED_STRING)
)
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_PLAIN_ENCODINGS = (b"", b"binary", b"8bit", b"7bit")
_MODEL_BYTES = 1024
_HEADERS = 8
_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Field:
    """Value of a field, and its place in the body."""

    value: str
    start: int
    end: int


class FormReader:
    """Reads a form in pieces. `field`: the model, once it is complete."""

    def __init__(self, content_type: bytes | None) -> None:
        """Read the boundary of the form. Raises BadRequest."""
        match = _BOUNDARY.fullmatch(content_type or b"")
        if match is None:
            raise BadRequest(
                "The request body is not a form.", hint="Send multipart/form-data with a boundary."
            )
        self.boundary: bytes = match[2]
        self.field: Field | None = None
        self._line = b"--" + self.boundary
        self._at = 0  # bytes before this piece
        self._tail = b"\r\n"  # end of the earlier pieces, in which a delimiter may begin
        self._trailer: bytes | None = None  # bytes after the last delimiter
        self._headers: dict[bytes, bytes] = {}
        self._name = self._header = b""
        self._has_model = self._is_in_model = False
        self._value = b""
        self._value_at = 0
        self._parser = MultipartParser(
            self.boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._part_data,
                "on_part_end": self._part_ends,
            },
            max_header_count=_HEADERS,
            max_header_size=_HEADER_BYTES,
        )

    def feed(self, data: bytes | bytearray) -> None:
        """Read the next piece of the body. Raises BadRequest."""
        begin = self._line[self._at : self._at + len(data)]
        if not data.startswith(begin):
            raise BadRequest(
                "The form does not start with its boundary.",
                hint="Check how the client writes multipart/form-data.",
            )
        self._check_delimiters(data)
        try:
            self._parser.write(bytes(data))
        except FormParserError as error:
            raise BadRequest(
                f"The form cannot be read: {error}.",
                hint="Check how the client writes multipart/form-data.",
            ) from None
        self._at += len(data)

    def _check_delimiters(self, data: bytes | bytearray) -> None:
        """Refuse a form that another parser could read in another way. Raises BadRequest."""
        if self._trailer is not None:
            joined_data = self._trailer + data
            start = -1
            trailer: bytes | None = joined_data
        else:
            joined_data = self._tail + data
            trailer = None
            start = joined_data.find(self._line, 2)
        while start >= 0:
            end = start + len(self._line)
            next_bytes = joined_data[end : end + 2]
            if joined_data[start - 2 : start] != b"\r\n" or not (
                b"\r\n".startswith(next_bytes) or b"--".startswith(next_bytes)
            ):
                raise _ambiguous_form_error("its boundary occurs where no part begins or ends")
            if next_bytes == b"--":
                trailer = joined_data[end + 2 :]
                break
            start = joined_data.find(self._line, end)
        if trailer is not None and not b"\r\n".startswith(trailer):
            raise _ambiguous_form_error("bytes follow its end")
        self._trailer = trailer
        self._tail = joined_data[-(len(self._line) + 3) :]

    # --- called by the parser ---

    def _part_begins(self) -> None:
        self._headers = {}
        self._is_in_model = False

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_ends(self) -> None:
        name = self._name.lower()
        value = self._header
        self._name = self._header = b""
        if name in self._headers or _CONTROL.search(value):
            raise _ambiguous_form_error(
                "a part has two headers of one name, or one with control characters"
            )
        self._headers[name] = value

    def _headers_end(self) -> None:
        match = _DISPOSITION.fullmatch(self._headers.get(b"content-disposition", b""))
        if match is None:
            raise _ambiguous_form_error(
                'a part does not begin with `Content-Disposition: form-data; name="..."` and at'
                " most a plain filename"
            )
        name = match["name"].strip(b'"')
        if name.strip().lower().partition(b"[")[0] != b"model":
            return
        encoding = self._headers.get(b"content-transfer-encoding", b"").lower()
        if name != b"model" or match["file"] or encoding not in _PLAIN_ENCODINGS or self._has_model:
            raise _ambiguous_form_error("`model` occurs twice, or is not a plain field", "model")
        self._has_model = self._is_in_model = True
        self._value = b""
        self._value_at = -1

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_in_model:
            if self._value_at < 0:
                self._value_at = self._at + start
            self._value += data[start:end]
            if len(self._value) > _MODEL_BYTES:
                raise BadRequest(
                    "`model` is too long.", hint="Send the name of a model.", param="model"
                )

    def _part_ends(self) -> None:
        if not self._is_in_model:
            return
        if _CONTROL.search(self._value):
            # A line break in the value may be the beginning of a delimiter, so the place of the
            # value is unknown.
            raise _ambiguous_form_error("`model` has control characters", "model")
        try:
            value = self._value.decode()
        except UnicodeDecodeError:
            raise BadRequest(
                "`model` is not UTF-8.", hint="Send the name of a model as text.", param="model"
            ) from None
        start = max(self._value_at, 0)
        self.field = Field(value, start, start + len(self._value))


def _ambiguous_form_error(reason: str, param: str | None = None) -> BadRequest:
    hint = (
        "Send each field once, without escapes, without blanks around `=`, and without quotes or"
        " backslashes in names."
    )
    return BadRequest(f"The form can be read in two ways: {reason}.", hint=hint, param=param)
