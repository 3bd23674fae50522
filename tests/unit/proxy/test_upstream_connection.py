"""The connection to an engine: a chunk that is passed on as it came is one that the parser reads
so, and the times at which an engine is asked again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.upstream_connection import UpstreamConnection
from gateway.proxy.upstream_pool import IDLE_S, SPARE_CONNECTION_LIFE_S, UpstreamPool

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Clock:
    """As much of a loop as a pool asks for."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Transport:
    """Of a connection that nobody closes but its owner."""

    closed = False

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def resume_reading(self) -> None:
        pass

    def write(self, data: bytes) -> None:
        pass


class RecordedExchange:
    """An exchange, its answer and the writer to its client: keeps all that the link gives."""

    keep_alive, has_sent_sse_head, status = True, False, 0

    def __init__(self) -> None:
        self.answer = self.writer = self
        self.output = b""
        self.ended: list[str] = []

    def write(self, data: bytes) -> None:
        self.output += data

    def head(self, link: UpstreamConnection, status: int) -> None:
        self.status = status
        link.is_framed = True

    def first_byte(self, data: bytes) -> None:
        self.ended.append(f"first byte of {len(data)}")

    def finish(self, link: UpstreamConnection, *, is_reusable: bool) -> None:
        link.flush(b"0\r\n\r\n" if link.is_framed else b"")
        self.ended.append(f"end, reusable: {is_reusable}")
        link.exchange = None

    def handle_failure(self, link: UpstreamConnection, reason: str) -> None:
        link.flush()
        self.ended.append("broke")
        link.exchange = None


class Parsed(UpstreamConnection):
    """Reads every chunk."""

    __slots__ = ()

    def _is_chunk(self, data: bytes) -> bool:
        return False


def pool(clock: Clock) -> UpstreamPool:
    return UpstreamPool("http://127.0.0.1:1", cast("asyncio.AbstractEventLoop", clock), 256)


def parse_answer(kind: type[UpstreamConnection], pieces: list[bytes]) -> tuple[Any, ...]:
    """The result of an answer that comes in these pieces."""
    link, exchange = kind(pool(Clock())), RecordedExchange()
    link.transport = cast("asyncio.Transport", Transport())
    link.send(cast("Any", exchange), b"", b"")
    for piece in pieces:
        link.data_received(piece)
    return unframe(exchange.output), exchange.ended, link.sent_bytes, b"".join(link.tail)


def unframe(data: bytes) -> tuple[bytes, bytes]:
    """The content of whole chunks that are framed as ours, and the bytes behind them."""
    content = b""
    while (at := data.find(b"\r\n")) > 0:
        size = int(data[:at], 16)
        if len(data) < at + size + 4 or size == 0:
            break
        content, data = content + data[at + 2 : at + 2 + size], data[at + size + 4 :]
    return content, data


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=8), st.data())
def test_chunks_mean_the_same_however_they_are_cut(
    chunks: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(map(chunk, chunks)) + b"0\r\n\r\n"
    cuts = (
        sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=6)))
        if data.draw(st.booleans())
        else []
    )
    for pieces in (
        [*map(chunk, chunks), b"0\r\n\r\n"],
        [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)],
    ):
        (pieces_of_answer, rest), has_ended, answer_bytes, _ = parse_answer(
            UpstreamConnection, [HEAD, *pieces]
        )
        assert (pieces_of_answer, rest, answer_bytes) == (
            b"".join(chunks),
            b"0\r\n\r\n",
            len(pieces_of_answer),
        )
        assert has_ended[-1] == "end, reusable: True"


ODD = [
    b"0\r\n\r\n",
    b"1\r\nx\r\n",
    b"01\r\nx\r\n",
    b"A\r\n0123456789\r\n",
    b"a;x=\r\n0123456789\r\n",
    b"2\r\n\r\n\r\n",
    b"1",
    b"\r\n",
    b"1\r\nxyz",
    b"3\r\nxy\r\n",
    b"0x1\r\nx\r\n",
    b"-1\r\n\r\n",
    b" 1\r\nx\r\n",
    b"1 \r\nx\r\n",
    b"1\nx\n",
    b"fffffffff\r\nx\r\n",
    b"x\r\n",
    b"",
]


@given(
    st.lists(
        st.one_of(st.sampled_from(ODD), st.binary(max_size=20), st.binary(max_size=20).map(chunk)),
        max_size=8,
    )
)
def test_a_chunk_of_another_form_is_left_to_the_parser(pieces: list[bytes]) -> None:
    pieces = [HEAD, chunk(b"first"), *pieces]
    assert parse_answer(UpstreamConnection, pieces) == parse_answer(Parsed, pieces)


@pytest.mark.parametrize("odd", ODD)
def test_each_unusual_chunk_is_parsed(odd: bytes) -> None:
    pieces = [HEAD, chunk(b"first"), odd, chunk(b"last")]
    assert parse_answer(UpstreamConnection, pieces) == parse_answer(Parsed, pieces)


def test_a_plain_chunk_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[bytes] = []
    monkeypatch.setattr(UpstreamConnection, "on_body", lambda _, data: chunks.append(data))
    parse_answer(
        UpstreamConnection,
        [
            HEAD,
            chunk(b"one"),
            chunk(b"two"),
            chunk(b"three")[:4],
            chunk(b"three")[4:],
            chunk(b"four"),
        ],
    )
    assert b"".join(chunks) == b"onethree"


def give_link(engine: UpstreamPool) -> UpstreamConnection:
    """A new connection that is idle in the pool of the engine."""
    link = UpstreamConnection(engine)
    link.transport = cast("asyncio.Transport", Transport())
    engine.release(link)
    return link


def test_an_idle_connection_is_good_while_an_engine_leaves_them_open_for_longer() -> None:
    clock = Clock()
    engine = pool(clock)
    links = []
    for _ in range(3):
        links.append(give_link(engine))
        clock.now += 2
    assert engine.acquire() is links[2]
    engine.release(links[2])
    clock.now += IDLE_S
    assert engine.acquire() is None  # the engines' servers may be about to close it
    engine.sweep(clock.now)
    assert engine.acquire() is links[2]  # the first one was left open for 10 s
    engine.release(links[2])
    clock.now += 2
    links[0].eof_received()
    links[0].transport.abort()
    clock.now += IDLE_S
    engine.sweep(clock.now)
    assert engine.acquire() is links[2]  # the second one is still open
    engine.release(links[2])
    links[1].eof_received()
    links[1].transport.abort()
    clock.now += IDLE_S
    assert engine.acquire() is None
    clock.now += SPARE_CONNECTION_LIFE_S
    engine.sweep(clock.now)
    assert all(link.transport.is_closing() for link in links)


def test_idle_connections_of_a_crowd_are_closed_within_half_a_minute() -> None:
    clock = Clock()
    engine = pool(clock)
    links = [give_link(engine) for _ in range(300)]
    clock.now += 29
    engine.sweep(clock.now)
    assert all(link.transport.is_closing() for link in links)
