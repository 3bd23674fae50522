"""Requests that parsers disagree on, each with its right results."""

from __future__ import annotations

import json
from dataclasses import dataclass


def body_for(model: str, **fields: object) -> bytes:
    document = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
    return json.dumps(document, separators=(",", ":")).encode()


def request(
    body: bytes,
    *headers: bytes,
    line: bytes = b"POST /v1/chat/completions HTTP/1.1",
    host: bytes | None = b"host: 127.0.0.1",
    length: bytes | None = b"",
    end: bytes = b"\r\n",
) -> bytes:
    """A request head and `body`. `length` b"": the right Content-Length; None: none."""
    lines = [
        line,
        *([host] if host is not None else []),
        b"content-type: application/json",
        b"x-canary: a",
        *headers,
    ]
    if length is not None:
        lines.append(b"content-length: " + (length or b"%d" % len(body)))
    return end.join(lines) + end * 2 + body


def chunks(*parts: bytes, extension: bytes = b"", end: bytes = b"\r\n") -> bytes:
    return b"".join(b"%x" % len(part) + extension + end + part + end for part in (*parts, b""))


H2C = (b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMA")


@dataclass(frozen=True)
class Seed:
    """A request and its right results. `asks`: how often the engine is asked; None when both
    answers are right."""

    name: str
    data: bytes
    asks: int | None


def corpus(model: str) -> list[Seed]:
    body = body_for(model)
    inner_request = request(body)
    chunk_header = b"transfer-encoding: chunked"
    in_chunks = chunks(body[:10], body[10:])

    def te(value: bytes, asks: int | None = 0) -> Seed:
        return Seed(f"te {value!r}", request(in_chunks, value, length=None), asks)

    def cl(value: bytes, asks: int | None = 0) -> Seed:
        return Seed(f"cl {value!r}", request(body, length=value), asks)

    def host(value: bytes | None, asks: int | None = 0) -> Seed:
        return Seed(f"host {value!r}", request(body, host=value), asks)

    def target(value: bytes, asks: int | None = 0) -> Seed:
        return Seed(f"target {value!r}", request(body, line=b"POST " + value + b" HTTP/1.1"), asks)

    return [
        Seed("plain", request(body), 1),
        Seed("stream", request(body_for(model, stream=True)), 1),
        Seed("chunked", request(in_chunks, chunk_header, length=None), 1),
        Seed(
            "chunked, one byte each",
            request(chunks(*(bytes([byte]) for byte in body)), chunk_header, length=None),
            1,
        ),
        Seed("two in a pipeline", request(body) + request(body), 2),
        Seed(
            "chunked, then one in a pipeline",
            request(in_chunks, chunk_header, length=None) + request(body),
            2,
        ),
        # Content-Length and Transfer-Encoding
        Seed(
            "CL.TE",
            request(
                chunks() + inner_request, chunk_header, length=b"%d" % (5 + len(inner_request))
            ),
            0,
        ),
        Seed("TE.CL", request(chunks(body) + inner_request, chunk_header, length=b"4"), 0),
        Seed(
            "CL, TE, right both ways",
            request(in_chunks, chunk_header, length=b"%d" % len(in_chunks)),
            0,
        ),
        Seed("CL.0", request(request(body), length=b"0"), None),
        te(b"transfer-encoding: xchunked"),
        te(b"transfer-encoding: chunked, identity"),
        te(b"transfer-encoding: identity, chunked", None),
        te(b"transfer-encoding: chunked, chunked", None),
        te(b"transfer-encoding: gzip, chunked", None),
        te(b"transfer-encoding: identity"),
        te(b'transfer-encoding: "chunked"'),
        te(b"transfer-encoding: chunked;q=1"),
        te(b"transfer-encoding:\x0bchunked"),
        te(b"transfer-encoding:\x0cchunked"),
        te(b"transfer-encoding: chunked\x00"),
        te(b"transfer-encoding : chunked"),
        te(b"transfer\x00-encoding: chunked"),
        te(b"transfer_encoding: chunked"),
        te(b" transfer-encoding: chunked"),
        te(b"x: y\ntransfer-encoding: chunked"),
        te(b"x: y\rtransfer-encoding: chunked"),
        te(b"transfer-encoding:\r\n chunked"),
        te(b"transfer-encoding: \xefchunked"),
        te(b"transfer-encoding: chunke\xc4\x91"),
        te(b"transfer-encoding: cHuNkEd", 1),
        te(b"transfer-encoding:\tchunked\t", None),
        Seed("TE twice", request(in_chunks, chunk_header, chunk_header, length=None), None),
        Seed(
            "TE chunked and identity",
            request(in_chunks, chunk_header, b"transfer-encoding: identity", length=None),
            0,
        ),
        Seed(
            "TE in HTTP/1.0",
            request(
                in_chunks, chunk_header, length=None, line=b"POST /v1/chat/completions HTTP/1.0"
            ),
            None,
        ),
        Seed(
            "TE in a trailer",
            request(
                chunks(body)[:-2] + b"content-length: 0\r\nhost: x\r\n\r\n",
                chunk_header,
                length=None,
            ),
            None,
        ),
        # Content-Length
        *(cl(b"%s%d" % (sign, len(body))) for sign in (b"+", b"-", b"0x", b"_")),
        cl(b"0%d" % len(body), None),
        cl(b"%d, %d" % (len(body), len(body)), None),
        cl(b"%d, 0" % len(body)),
        cl(b"%d 0" % len(body)),
        cl(b"%d\x00" % len(body)),
        cl(b"%d.0" % len(body)),
        cl(b"1e2"),
        cl(b"-1"),
        cl(b"18446744073709551615"),
        cl(b"18446744073709551616"),
        cl(b"%d" % (2**64 + len(body))),
        cl(b"9" * 400),
        cl(b"\xef\xbc\x91\xef\xbc\x90"),
        Seed("two CL", request(body, b"content-length: 0"), 0),
        Seed("two equal CL", request(body, b"content-length: %d" % len(body)), None),
        Seed("no framing", request(body, length=None), 0),
        Seed(
            "CL with a space before the colon",
            request(body, b"content-length : %d" % len(body), length=None),
            0,
        ),
        # line ends and folds
        Seed("bare LF", request(body, end=b"\n"), 0),
        Seed(
            "bare LF before a hidden one",
            request(inner_request, b"x: y\n\n" + inner_request.replace(b"\r\n", b"\n")),
            0,
        ),
        Seed("bare CR", request(body, b"x: y\rz: w"), 0),
        Seed("folded", request(body, b"x: y\r\n z"), 0),
        Seed("folded host", request(body, host=b"host:\r\n 127.0.0.1"), 0),
        Seed("CR LF before the request", b"\r\n\r\n" + request(body), None),
        Seed("LF LF ends the head", request(body).replace(b"\r\n\r\n", b"\n\n", 1), 0),
        Seed("CR CR LF", request(body, b"x: y\r"), 0),
        # chunks
        Seed(
            "chunk extension",
            request(chunks(body, extension=b";a=b"), chunk_header, length=None),
            None,
        ),
        Seed(
            "chunk extension with a bare LF",
            request(chunks(body, extension=b";a\nb"), chunk_header, length=None),
            0,
        ),
        Seed(
            "chunk extension without end",
            request(b"5;" + b"a" * 100_000, chunk_header, length=None),
            0,
        ),
        Seed(
            "chunk size with a sign",
            request(b"+%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), chunk_header, length=None),
            0,
        ),
        Seed(
            "chunk size in hex notation",
            request(b"0x%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), chunk_header, length=None),
            0,
        ),
        Seed(
            "chunk size over 64 bits",
            request(b"1%016x\r\n%s\r\n0\r\n\r\n" % (len(body), body), chunk_header, length=None),
            0,
        ),
        Seed(
            "chunk size with a space",
            request(b"%x \r\n%s\r\n0\r\n\r\n" % (len(body), body), chunk_header, length=None),
            None,
        ),
        Seed(
            "chunk size with underscores",
            request(b"0_%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), chunk_header, length=None),
            0,
        ),
        Seed(
            "chunk that lies",
            request(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body) - 3, body), chunk_header, length=None),
            0,
        ),
        Seed("chunks with bare LF", request(chunks(body, end=b"\n"), chunk_header, length=None), 0),
        Seed(
            "chunk without its end",
            request(b"%x\r\n%sXX0\r\n\r\n" % (len(body), body), chunk_header, length=None),
            0,
        ),
        Seed(
            "chunks, then a hidden head in a trailer",
            request(chunks(body)[:-2] + b"x: " + inner_request, chunk_header, length=None),
            None,
        ),
        # names and values
        Seed("NUL in a value", request(body, b"x: a\x00b"), 0),
        Seed("NUL in a name", request(body, b"x\x00: a"), 0),
        Seed("no colon", request(body, b"garbage"), 0),
        Seed("no name", request(body, b": a"), 0),
        Seed("space in a name", request(body, b"x y: a"), 0),
        Seed("high bytes in a value", request(body, b"x: \xff\xfe"), None),
        Seed("head over 32 KiB", request(body, b"x: " + b"a" * 40_000), 0),
        Seed("head over 4 MiB", request(body, b"x: " + b"a" * 2**22), 0),
        Seed("4,000 headers", request(body, *(b"x-%d: a" % number for number in range(4000))), 0),
        Seed("a line that breaks out of a passed header", request(body, b"accept: a\r\n\tb"), 0),
        Seed(
            "traceparent with a quote of a head", request(body, b"traceparent: a%0d%0ax-evil: b"), 1
        ),
        Seed("x-request-id that breaks out", request(body, b"x-request-id: a\x0bb"), None),
        # Host
        host(None),
        host(b"host: 127.0.0.1\r\nhost: 127.0.0.1"),
        host(b"host: x/evil?a="),
        host(b"host: 127.0.0.1#"),
        host(b"host: 127.0.0.1/healthz?"),
        host(b"host: a@127.0.0.1"),
        host(b"host: 127.0.0.1:80:80"),
        host(b"host: 127.0.0.1, evil"),
        host(b"host: "),
        host(b"host: evil.example"),
        # targets and methods
        target(b"http://127.0.0.1/v1/chat/completions", None),
        target(b"http://evil.example/v1/chat/completions", None),
        target(b"//v1/chat/completions"),
        target(b"/v1//chat/completions"),
        target(b"/v1/chat/completions/"),
        target(b"/v1/chat/completions?a=b", None),
        target(b"/v1/chat/completions#a", None),
        target(b"/v1/chat/completions%20HTTP/1.1"),
        target(b"/v1/chat/../../sleep"),
        target(b"/v1/chat/completions/../../../sleep"),
        target(b"/v1/%63hat/completions", None),
        target(b"/v1/chat%2fcompletions", None),
        target(b"/v1/chat/completions;a=b"),
        target(b"/sleep"),
        target(b"*"),
        target(b"\\v1\\chat\\completions"),
        target(b"/v1/chat/completions\t"),
        Seed(
            "a space in the target", request(body, line=b"POST /v1/chat/completions x HTTP/1.1"), 0
        ),
        Seed("no version", request(body, line=b"POST /v1/chat/completions"), 0),
        Seed("no version, upgrade", request(body, *H2C, line=b"POST /v1/chat/completions"), 0),
        Seed(
            "HTTP/1.0, upgrade",
            request(body, *H2C, line=b"POST /v1/chat/completions HTTP/1.0"),
            None,
        ),
        Seed("HTTP/0.9", b"POST /v1/chat/completions\r\n\r\n" + body, 0),
        Seed("HTTP/1.2", request(body, line=b"POST /v1/chat/completions HTTP/1.2"), None),
        Seed("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + body, 0),
        Seed("h2c upgrade", request(body, *H2C), None),
        Seed("h2c upgrade over two CL", request(body, *H2C, b"content-length: 0"), 0),
        Seed(
            "h2c upgrade over CL and TE",
            request(chunks(body), *H2C, b"transfer-encoding: chunked", length=b"4"),
            0,
        ),
        Seed("h2c upgrade, then a hidden one", request(body, *H2C, length=b"0") + body, 0),
        Seed(
            "websocket",
            request(
                b"",
                b"connection: upgrade",
                b"upgrade: websocket",
                b"sec-websocket-version: 13",
                b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
                line=b"GET /v1/chat/completions HTTP/1.1",
                length=None,
            ),
            0,
        ),
        Seed("GET with a body", request(body, line=b"GET /v1/chat/completions HTTP/1.1"), 0),
        Seed("CONNECT", request(b"", line=b"CONNECT 127.0.0.1:80 HTTP/1.1", length=None), 0),
        Seed("lower-case method", request(body, line=b"post /v1/chat/completions HTTP/1.1"), 0),
        Seed("expect", request(body, b"expect: 100-continue"), None),
        Seed("connection names a header", request(body, b"connection: content-length"), None),
        Seed("body longer than said", request(body, length=b"%d" % (len(body) - 1)), 0),
        Seed("body shorter than said", request(body, length=b"%d" % (len(body) + 5)), 0),
        # bodies
        Seed("not JSON", request(b"not json"), 0),
        Seed("bad UTF-8", request(body.replace(b"hi", b"\xff\xfe")), 0),
        Seed(
            "deep",
            request(
                b'{"model":"' + model.encode() + b'","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
            ),
            None,
        ),
        Seed("two models", request(b'{"model":"other",' + body[1:]), 1),
        Seed("two models, the last unknown", request(body[:-1] + b',"model":"other"}'), 0),
        Seed("a long model name", request(body_for("x" * 1_000_000)), 0),
        Seed("gzip", request(b"\x1f\x8b\x08\x00" + b"\x00" * 20, b"content-encoding: gzip"), 0),
    ]
