"""Heads that come again: taken for the same only where they are, and never once the keys have
changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy import head_cache
from gateway.proxy.access.auth import Keys
from gateway.proxy.client_connection import ClientConnection
from gateway.proxy.request_reader import RequestReader
from gateway.secret import Secret
from tests.support.dataplane import ASK, Gateway, answers, stage, until
from tests.support.patience import HANG_S
from tests.support.upstream import Call

pytestmark = pytest.mark.anyio

KEY = "k" * 40
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nauthorization: Bearer %b\r\nContent-Length:"
    b" %d\r\naccept: a/b\r\n\r\n"
)
ENGINE = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ncontent-length: %d\r\n\r\n%b"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway(Keys(None, Secret(KEY))) as running:
        yield running


def ask(user: str = "u", key: str = KEY) -> bytes:
    body = json.dumps({**ASK, "user": user}).encode()
    return HEAD % (key.encode(), len(body)) + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_S)
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    return int(head.split()[1]), await asyncio.wait_for(reader.readexactly(length), HANG_S)


@pytest.fixture
def parsed_urls(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The urls of the heads that the parser read."""
    read: list[bytes] = []
    complete = RequestReader.on_headers_complete

    def on_headers_complete(reader: RequestReader) -> None:
        read.append(reader.url)
        complete(reader)

    monkeypatch.setattr(RequestReader, "on_headers_complete", on_headers_complete)
    return read


async def test_a_head_that_comes_again_is_read_once_and_its_bodies_are_the_engine_s(
    gateway: Gateway,
) -> None:
    async with stage(gateway, answers) as [upstream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for user in "abcdef":
            writer.write(ask(user))
            assert (await answer(reader))[0] == 200
        split = [request.partition(b"\r\n\r\n") for request in upstream.requests]
        assert [json.loads(body)["user"] for _, _, body in split] == list("abcdef")
        assert all(b"\r\naccept: a/b" in head for head, _, _ in split)
        assert len({head.partition(b"x-request-id: ")[2].split()[0] for head, _, _ in split}) == 6
        writer.close()


async def test_only_the_same_head_in_one_piece_is_not_read_again(
    gateway: Gateway, parsed_urls: list[bytes]
) -> None:
    await until(lambda: not gateway.plane.connections)
    async with stage(gateway, answers):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        # A length with more digits moves the bytes after it.
        for user, reads in (
            ("u", 1),
            ("v", 1),
            ("longer", 1),
            ("x" * 90, 2),
            ("x" * 91, 2),
            ("u", 3),
        ):
            writer.write(ask(user))
            assert (await answer(reader))[0] == 200
            assert (user, len(parsed_urls)) == (user, reads)
        writer.write(ask() + ask())
        for _ in range(2):
            assert (await answer(reader))[0] == 200
        data = ask()
        [front] = gateway.plane.connections
        assert isinstance(front, ClientConnection)
        for piece, byte_count in ((data[:30], 30), (data[30:-5], len(data) - 5), (data[-5:], 5)):
            writer.write(piece)
            await until(lambda size=byte_count: front._reader._received_bytes == size)  # type: ignore[misc]
        assert (await answer(reader))[0] == 200
        assert len(parsed_urls) == 6
        writer.close()


@pytest.mark.parametrize("header", ["x-request-id: 1", "traceparent: 1", "expect: 100-continue"])
async def test_a_header_that_changes_with_each_request_is_read_each_time(
    gateway: Gateway, parsed_urls: list[bytes], header: str
) -> None:
    async with stage(gateway, answers):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for turn in range(3):
            writer.write(ask().replace(b"accept: a/b", header.encode()))
            if header.startswith("expect"):
                assert (
                    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_S)
                    == b"HTTP/1.1 100 Continue\r\n\r\n"
                )
            assert (await answer(reader))[0] == 200
            assert len(parsed_urls) == turn + 1
        writer.close()


async def test_another_key_and_keys_that_were_changed_are_looked_at(gateway: Gateway) -> None:
    keys = gateway.plane.keys
    assert isinstance(keys, Keys)
    async with stage(gateway, answers):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for key, status in ((KEY, 200), (KEY, 200), ("l" * 40, 401)):
            writer.write(ask(key=key))
            assert (await answer(reader))[0] == status
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for _ in range(2):
            writer.write(ask())
            assert (await answer(reader))[0] == 200
        fixed_keys, keys._fixed_keys = keys._fixed_keys, ()
        try:
            keys.swap((), is_closed=True)
            writer.write(ask())
            assert (await answer(reader))[0] == 403
        finally:
            keys._fixed_keys = fixed_keys
            keys.swap(())
        writer.close()


async def test_answers_with_the_same_head_are_told_apart_by_their_bytes(gateway: Gateway) -> None:
    engine_answers = [
        ENGINE % (2, b"{}"),
        ENGINE % (2, b"[]"),
        ENGINE % (1, b"1"),
        ENGINE % (10, b"0123456789"),
    ]
    engine_answers += [
        ENGINE.replace(b"a/b", b"a/c") % (2, b"[]"),
        ENGINE % (0, b""),
        ENGINE % (2, b"{}"),
    ]

    async def script(call: Call) -> None:
        await call.send(engine_answers[len(upstream.requests) - 1])

    async with stage(gateway, script) as [upstream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for engine_answer in engine_answers:
            writer.write(ask())
            assert await answer(reader) == (200, engine_answer.partition(b"\r\n\r\n")[2])
        assert len(upstream.calls) == 1
        writer.close()


async def test_bytes_behind_an_answer_of_a_known_head_reach_nobody(
    gateway: Gateway,
) -> None:
    async def script(call: Call) -> None:
        turn = len(upstream.requests)
        await call.send(ENGINE % (2, b"{}") + (b"evil" if turn == 3 else b""))

    async with stage(gateway, script) as [upstream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for _ in range(5):
            writer.write(ask())
            assert await answer(reader) == (200, b"{}")
        assert len(upstream.calls) == 2
        writer.close()


GOOD = ENGINE % (12, b"x" * 12)


@given(
    st.binary(max_size=40),
    st.integers(0, len(GOOD)),
    st.integers(0, len(GOOD)),
    st.binary(max_size=300),
)
def test_nothing_else_is_taken_for_a_known_head(
    insertion: bytes, start: int, stop: int, body: bytes
) -> None:
    echo = head_cache.remember_answer(GOOD, 200, (), b"12", 12)
    assert echo is not None
    assert echo.body(GOOD) == b"x" * 12
    mutation = GOOD[:start] + insertion + GOOD[stop:]
    echo_body = echo.body(mutation)
    assert echo_body is None or mutation == ENGINE % (len(echo_body), echo_body)
    answer = ENGINE % (len(body), body)
    assert echo.body(answer) == (body if 10 <= len(body) < 100 else None)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\n\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: 1\r\ncontent-length: 2 \r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}x",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nx: content-length: 2\r\n\r\n{}",
    ],
)
def test_an_unusual_answer_is_not_remembered(data: bytes) -> None:
    assert head_cache.remember_answer(data, 200, (), b"2", 2) is None


@pytest.mark.parametrize("read", [0, 1, 11, 13])
def test_a_head_behind_which_the_parser_found_another_body_is_not_remembered(read: int) -> None:
    assert head_cache.remember_answer(GOOD, 200, (), b"12", read) is None
    assert head_cache.remember_answer(ENGINE % (0, b""), 200, (), b"0", 0) is None
