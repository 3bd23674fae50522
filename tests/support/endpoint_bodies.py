"""Bodies of requests to each endpoint."""

from __future__ import annotations


def body_of(*parts: tuple[str, bytes], boundary: bytes = b"XyZ") -> bytes:
    lines = [
        b"--%b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n"
        % (boundary, name.encode(), value)
        for name, value in parts
    ]
    return b"".join(lines) + b"--%b--\r\n" % boundary


def form_request(
    body: bytes, content_type: bytes = b"multipart/form-data; boundary=XyZ", length: bool = True
) -> bytes:
    framing = b"content-length: %d" % len(body) if length else b"transfer-encoding: chunked"
    head = (
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\ncontent-type: %b\r\n%b\r\n\r\n"
        % (content_type, framing)
    )
    return head + (body if length else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
