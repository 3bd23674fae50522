"""How many requests there are in a run of bytes, read as strictly as RFC 9112 allows."""

from __future__ import annotations

import re

# Section 3 of it lets a reader split the request line at any run of spaces, and many do.
LINE = re.compile(rb"[!-~]+ +[!-~]+ +HTTP/1\.[01]")
FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t -~]*)?[ \t]*\r\n")


def count_requests(data: bytes) -> int:
    """Complete requests in `data`, up to the first that parsers of HTTP/1.1 read in different
    ways."""
    count = 0
    while True:
        data = data.lstrip(b"\r\n")
        head, separator, rest = data.partition(b"\r\n\r\n")
        line, *lines = head.split(b"\r\n")
        fields = [FIELD.fullmatch(line) for line in lines]
        if not separator or not LINE.fullmatch(line) or not all(fields):
            return count
        fields_by_name = [
            (match[1].lower(), match[2].strip(b" \t").lower()) for match in fields if match
        ]
        codings = [value for name, value in fields_by_name if name == b"transfer-encoding"]
        lengths = {
            part.strip()
            for name, value in fields_by_name
            if name == b"content-length"
            for part in value.split(b",")
        }
        if codings:
            rest_after_body = (
                _after_chunks(rest)
                if not lengths and codings[-1].rpartition(b",")[2].strip() == b"chunked"
                else None
            )
        elif (
            all(length.isdigit() for length in lengths)
            and len({int(length[-30:]) for length in lengths}) <= 1
        ):
            size = int(lengths.pop()[-30:]) if lengths else 0
            rest_after_body = rest[size:] if size <= len(rest) else None
        else:
            rest_after_body = None
        if rest_after_body is None:
            return count
        count, data = count + 1, rest_after_body


def _after_chunks(data: bytes) -> bytes | None:
    """The bytes behind a chunked body; None when it is not one."""
    while size := CHUNK.match(data):
        data = data[size.end() :]
        if int(size[1], 16) == 0:
            while data[:2] != b"\r\n":  # trailers
                line, separator, data = data.partition(b"\r\n")
                if not separator or not FIELD.fullmatch(line):
                    return None
            return data[2:]
        end = int(size[1], 16)
        if data[end : end + 2] != b"\r\n":
            return None
        data = data[end + 2 :]
    return None
