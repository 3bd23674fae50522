"""The form of an upload, read while it arrives: the bytes of the file go on immediately."""

from __future__ import annotations

from collections.abc import Callable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import BadRequest

_HINT = "Send multipart/form-data with the fields `purpose` and `file`."
_MAX_FIELDS = 8
_FIELD_BYTES = 1024
_HEADERS = 8
_HEADER_BYTES = 4096


class FileForm:
    """Reads a form in pieces.

    fields: texts by name, complete at the end.
    filename: that of the file; None before a file has begun.
    is_complete: the form has ended.
    """

    def __init__(self, content_type: str, write: Callable[[bytes], object]) -> None:
        """Read the boundary. write: takes each piece of the file. Raises BadRequest."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 70:
            raise BadRequest("The request body is not a form.", hint=_HINT)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_complete = False
        self._write = write
        self._headers: dict[bytes, bytes] = {}
        self._header_name = self._header = b""
        self._field: str | None = None  # None: the file
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._start_part,
                "on_header_field": self._read_header_name,
                "on_header_value": self._read_header,
                "on_header_end": self._finish_header,
                "on_headers_finished": self._finish_headers,
                "on_part_data": self._read_data,
                "on_end": self._finish,
            },
            max_header_count=_HEADERS,
            max_header_size=_HEADER_BYTES,
        )

    def feed(self, data: bytes) -> None:
        """Read the next piece. Raises BadRequest, and the errors of `write`."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadRequest(f"The form cannot be read: {error}.", hint=_HINT) from None

    # --- called by the parser ---

    def _start_part(self) -> None:
        self._headers = {}

    def _read_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _read_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _finish_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header
        self._header_name = self._header = b""

    def _finish_headers(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        if kind != b"form-data" or not name:
            raise BadRequest("A part of the form has no name.", hint=_HINT)
        if name == "file":
            if self.filename is not None:
                raise BadRequest("The form has two files.", hint="Send one file a request.")
            self._field = None
            self.filename = _plain_name(options.get(b"filename", b"").decode(errors="replace"))
            return
        if name in self.fields or len(self.fields) >= _MAX_FIELDS:
            raise BadRequest("The form has a field twice, or too many.", hint=_HINT)
        self._field = name
        self.fields[name] = ""

    def _read_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._write(data[start:end])
            return
        text = self.fields[self._field] + data[start:end].decode(errors="replace")
        if len(text) > _FIELD_BYTES:
            raise BadRequest(f"The field {self._field[:100]} is too long.", hint=_HINT)
        self.fields[self._field] = text

    def _finish(self) -> None:
        self.is_complete = True


def _plain_name(filename: str) -> str:
    """The last part of a file's name, without control characters."""
    base_name = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in base_name if char.isprintable())[:255] or "file.jsonl"
