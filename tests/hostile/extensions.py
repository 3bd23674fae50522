"""Requests with parts that HTTP allows and nobody here needs: upgrades, trailers, and many requests
ahead."""

from __future__ import annotations

from tests.hostile.corpus import H2C, Seed, body_for, chunks, request

CHUNKED = b"transfer-encoding: chunked"
WEBSOCKET = (
    b"connection: upgrade",
    b"upgrade: websocket",
    b"sec-websocket-version: 13",
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)
UPGRADES = (
    b"WebSocket",
    b"websocket, h2c",
    b"h2c, websocket",
    b"websocket/13",
    b"\twebsocket",
    b"websocket\x00",
    b"TLS/1.0",
    b"HTTP/2.0",
    b"IRC/6.9",
    b"",
    b",",
    b"*",
    b"\xff\xfe",
    b"a" * 5000,
)


def upgrades(model: str) -> list[Seed]:
    """For any request, nothing but HTTP/1.1 is spoken: refused, or read as if it had not been asked
    for."""
    body = body_for(model)
    inner_request = request(body)

    def websocket_seed(line: bytes) -> Seed:
        return Seed(
            f"websocket at {line!r}",
            request(b"", *WEBSOCKET, line=line + b" HTTP/1.1", length=None),
            0,
        )

    return [
        *(
            websocket_seed(line)
            for line in (
                b"GET /",
                b"GET /healthz",
                b"GET /admin/models",
                b"GET /v1/models",
                b"POST /",
                b"OPTIONS *",
            )
        ),
        Seed("websocket with a body", request(body, *WEBSOCKET), 0),
        Seed(
            "websocket with a chunked body",
            request(chunks(body), *WEBSOCKET, CHUNKED, length=None),
            0,
        ),
        Seed(
            "websocket, a body that never comes",
            request(b"", *WEBSOCKET, line=b"POST / HTTP/1.1", length=b"5"),
            0,
        ),
        Seed(
            "websocket, then a hidden one", request(b"", *WEBSOCKET, length=b"0") + inner_request, 0
        ),
        Seed(
            "websocket, then frames",
            request(b"", *WEBSOCKET, length=None) + b"\x81\x85abcd" + b"\x00" * 200,
            0,
        ),
        Seed("websocket over two CL", request(body, *WEBSOCKET, b"content-length: 0"), 0),
        Seed(
            "websocket in HTTP/1.0",
            request(body, *WEBSOCKET, line=b"POST /v1/chat/completions HTTP/1.0"),
            None,
        ),
        Seed(
            "websocket behind a good one", inner_request + request(b"", *WEBSOCKET, length=None), 1
        ),
        Seed("two upgrades", request(body, *WEBSOCKET, b"upgrade: h2c"), None),
        Seed("upgrade without connection", request(body, b"upgrade: websocket"), None),
        Seed("connection without upgrade", request(body, b"connection: upgrade"), None),
        Seed("h2c behind a good one", inner_request + request(body, *H2C), None),
        Seed("h2c with a chunked body", request(chunks(body), *H2C, CHUNKED, length=None), None),
        Seed("h2c twice", request(body, *H2C) * 2, None),
        Seed(
            "h2c with trailers",
            request(chunks(body)[:-2] + b"a: b\r\n\r\n", *H2C, CHUNKED, length=None),
            None,
        ),
        Seed(
            "h2c at the admin side",
            request(b"", *H2C, line=b"POST /admin/models HTTP/1.1") + inner_request,
            None,
        ),
        Seed("CONNECT with a websocket", request(body, *WEBSOCKET, line=b"CONNECT / HTTP/1.1"), 0),
        *(
            Seed(
                f"upgrade {value[:20]!r}",
                request(body, b"connection: upgrade", b"upgrade: " + value),
                None,
            )
            for value in UPGRADES
        ),
    ]


def trailers(model: str) -> list[Seed]:
    """Trailers are read past: they set nothing, and a few bytes of them are all that a body may
    have."""
    body = body_for(model)
    chunk = chunks(body)[:-2]

    def trailer_seed(name: str, fields: bytes, asks: int | None) -> Seed:
        return Seed(
            f"trailers: {name}",
            request(chunk + fields + b"\r\n", CHUNKED, length=None),
            asks,
        )

    return [
        trailer_seed("one", b"x-digest: a\r\n", 1),
        trailer_seed("a key", b"authorization: Bearer stolen\r\nx-api-key: stolen\r\n", None),
        trailer_seed("framing", b"content-length: 0\r\ntransfer-encoding: chunked\r\n", None),
        trailer_seed("an upgrade", b"connection: upgrade\r\nupgrade: websocket\r\n", None),
        trailer_seed(
            "a body of another kind",
            b"content-type: text/plain\r\ncontent-encoding: gzip\r\n",
            None,
        ),
        trailer_seed("without end", b"a: b\r\n" * 60_000, 0),
        trailer_seed("one long name", b"a" * 300_000 + b": b\r\n", 0),
        trailer_seed("one long value", b"a: " + b"b" * 300_000 + b"\r\n", 0),
        trailer_seed("folded", b"a: b\r\n c\r\n", None),
        trailer_seed("no colon", b"garbage\r\n", 0),
        trailer_seed("bare LF", b"a: b\nc: d\r\n", None),
        trailer_seed("NUL", b"a: \x00\r\n", 0),
        Seed(
            "trailers at the admin side",
            request(chunk, CHUNKED, line=b"POST /admin/models HTTP/1.1", length=None),
            0,
        ),
        Seed(
            "trailers, then one in a pipeline",
            request(chunk + b"a: b\r\n\r\n", CHUNKED, length=None) + request(body),
            2,
        ),
        Seed(
            "trailers of a refused one",
            request(chunk + b"a: b\r\n" * 60_000, CHUNKED, line=b"POST /v1/x HTTP/1.1"),
            0,
        ),
    ]


def pipelines(model: str) -> list[Seed]:
    """Requests that come before their turn."""
    good, large = request(body_for(model)), request(body_for(model, padding="a" * 17_000))
    chunk_request = request(chunks(body_for(model)), CHUNKED, length=None)
    other_request = request(b"", line=b"GET /v1/models HTTP/1.1", length=None)
    health = request(b"", line=b"GET /healthz HTTP/1.1", length=None)
    cut_request = request(b"{", length=b"100000")
    return [
        Seed("eight ahead", good * 8, 8),
        Seed("forty ahead", good * 40, None),
        Seed("four large ones ahead", large * 4, 4),
        Seed("both kinds in turn", (good + other_request + health + chunk_request) * 2, 4),
        Seed("unfinished behind good ones", good * 3 + cut_request, 3),
        Seed("a refused one between good ones", good + request(b"not json") + good, 2),
        Seed("a bad head behind good ones", good * 2 + request(b"", b"x y: a"), 2),
        Seed(
            "the first one asks to close", request(body_for(model), b"connection: close") + good, 1
        ),
        Seed("a stream between", good + request(body_for(model, stream=True)) + good, 3),
        Seed(
            "HTTP/1.0 first",
            request(body_for(model), line=b"POST /v1/chat/completions HTTP/1.0") + good,
            None,
        ),
        Seed(
            "expect behind a good one",
            good + request(body_for(model), b"expect: 100-continue"),
            None,
        ),
    ]
