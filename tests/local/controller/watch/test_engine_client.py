"""Any answer of an engine to the gateway's own questions: bounded bytes, bounded time, and an error
in words."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from gateway.controller.watch.engine_client import (
    SMALL_BYTES,
    EngineClient,
    EngineResponse,
    NoAnswerError,
)
from tests.support.dataplane import never_answers, refused_url, until
from tests.support.patience import HANG_S
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

Script = Callable[[Call], Awaitable[None]]
MIB = 1024 * 1024


class HeaderNames(msgspec.Struct):
    names: list[str]


def says(data: bytes, *, closes: bool = True) -> Script:
    async def script(call: Call) -> None:
        await call.send(data)
        if closes:
            call.close()

    return script


def replies(body: bytes, status: str = "200 OK", headers: str = "") -> Script:
    return lambda call: call.reply(body, status, headers)


def endless(piece: bytes, head: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> Script:
    async def script(call: Call) -> None:
        await call.send(head)
        while not call.closed.is_set():
            await call.send(piece)

    return script


async def drips(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    while not call.closed.is_set():
        await call.send(b" ")
        await asyncio.sleep(0.01)


async def ask_engine(
    script: Script, within_s: float = HANG_S, most_bytes: int = SMALL_BYTES
) -> EngineResponse:
    """The answer. However it ends, nothing of the call is left open."""
    async with Upstream(script) as upstream:
        try:
            return await EngineClient(4).get(f"{upstream.url}/v1/models", within_s, most_bytes)
        finally:
            await until(lambda: all(call.closed.is_set() or call.dead for call in upstream.calls))


UNUSABLE: dict[str, tuple[Script, str]] = {
    "an answer that unpacks": (
        replies(gzip.compress(b" " * MIB), headers="content-encoding: gzip\r\n"),
        "encodes",
    ),
    "an encoding nobody knows": (replies(b"{}", headers="content-encoding: zebra\r\n"), "encodes"),
    "a long answer": (replies(b" " * MIB), "more than 65536 bytes"),
    "a body without end": (endless(b" " * 9000), "more than"),
    "chunks without end": (
        endless(b"1\r\nx\r\n" * 500, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"),
        "more than",
    ),
    "a chunk extension without end": (
        endless(b"x" * 9000, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;"),
        "more than|HTTP",
    ),
    "trailers without end": (
        endless(b"a: b\r\n" * 900, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"),
        "more than|HTTP",
    ),
    "a head without end": (endless(b"a: b\r\n" * 900, b"HTTP/1.1 200 OK\r\n"), "more than"),
    "one header without end": (endless(b"b" * 9000, b"HTTP/1.1 200 OK\r\na: "), "more than"),
    "nothing but interim answers": (
        endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 99, b""),
        "more than",
    ),
    "garbage": (says(b"\x00\xff" * 500), "does not speak HTTP"),
    "another protocol": (says(b"SSH-2.0-OpenSSH_9.9\r\n"), "does not speak HTTP"),
    "two lengths": (
        says(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx"),
        "does not speak HTTP",
    ),
    "nothing": (says(b""), "closes"),
    "half a head": (says(b"HTTP/1.1 200 OK\r\nconte"), "closes"),
    "half a body": (says(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx"), "closes"),
}


@pytest.mark.parametrize("case", UNUSABLE)
async def test_an_answer_that_cannot_be_used_is_an_error_in_words(case: str) -> None:
    script, words = UNUSABLE[case]
    with pytest.raises(NoAnswerError, match=words):
        await ask_engine(script)


@pytest.mark.parametrize("script", [never_answers, drips], ids=["silent", "drips"])
async def test_an_answer_has_so_much_time_in_all(script: Script) -> None:
    with pytest.raises(NoAnswerError, match="within"):
        await ask_engine(script, within_s=0.3)


async def test_an_unreachable_engine_does_not_answer() -> None:
    client = EngineClient(4)
    with pytest.raises(NoAnswerError, match="does not answer"):
        await client.get(f"{refused_url()}/health", HANG_S)
    for url in ("http://h:x/health", "http://[::1/health", "http://127.0.0.1:9/\ud800"):
        with pytest.raises(NoAnswerError, match="not a URL"):
            await client.get(url, HANG_S)


async def test_a_redirect_is_an_answer_and_not_followed() -> None:
    async with Upstream(never_answers) as other_upstream:
        answer = await ask_engine(
            replies(b"", "307 Temporary Redirect", f"location: {other_upstream.url}/\r\n")
        )
        assert answer.status == 307
        assert not other_upstream.calls


@pytest.mark.parametrize(
    "data",
    [
        b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"names":["x"]}',
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding:"
            b' chunked\r\n\r\n7\r\n{"names\r\n8\r\n":["x"]}\r\n0\r\n\r\n'
        ),
        b'HTTP/1.0 200 OK\r\n\r\n{"names":["x"]}',
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-encoding:"
            b' identity\r\ncontent-length: 15\r\n\r\n{"names":["x"]}'
        ),
    ],
    ids=["length", "chunks", "until it closes", "after an interim answer"],
)
async def test_a_good_answer_is_read_however_it_is_framed(data: bytes) -> None:
    answer = await ask_engine(says(data))
    assert (await answer.read(HeaderNames)).names == ["x"]


async def test_a_request_to_an_engine_is_plain() -> None:
    async with Upstream(replies(b"{}")) as upstream:
        await EngineClient(4).post(f"{upstream.url}/v1/completions", {"model": "m"}, HANG_S)
        head, _, body = upstream.requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"accept-encoding: identity\r\n" in head
        assert b"connection: close\r\n" in head
        assert json.loads(body) == {"model": "m"}


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"other":' + b"[" * 200_000,
        b"",
        b"null",
        b"[]",
        b'{"names": 1}',
        b'{"names": [1]}',
        b'{"names": ["\xff"]}',
        b'{"names": ["\\ud800"]}',
        b'{"names": ["x"]} and more',
        b'{"names": ["x"], "other": NaN}',
        b"\xef\xbb\xbf{}",
    ],
)
async def test_json_of_another_kind_is_an_error_in_words(body: bytes) -> None:
    answer = await ask_engine(replies(body), most_bytes=MIB)
    with pytest.raises(NoAnswerError, match="unexpected answer") as error:
        await answer.read(HeaderNames)
    str(error.value).encode()


async def test_json_that_nobody_asked_for_makes_no_objects() -> None:
    body = b'{"other": [' + b"[]," * (MIB - 20) + b'[]], "names": ["x"]}'
    answer = EngineResponse(200, body)
    tracemalloc.start()
    try:
        assert (await answer.read(HeaderNames)).names == ["x"]
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_the_words_of_an_answer_are_fit_for_a_terminal() -> None:
    words = EngineResponse(
        500, b"\x1b[31mred\x1b]0;title\x07\r\nnext \xff\x00" + b"x" * 1000
    ).excerpt
    assert words.isprintable()
    assert len(words) <= 200


async def test_calls_at_once_are_limited_and_the_time_of_the_others_begins_with_theirs() -> None:
    free = asyncio.Event()

    async def hold_answer(call: Call) -> None:
        await free.wait()
        await call.reply(b"")

    async with Upstream(hold_answer) as upstream:
        client = EngineClient(3)
        calls = [
            asyncio.create_task(client.get(f"{upstream.url}/health", HANG_S)) for _ in range(10)
        ]
        await until(lambda: len(upstream.requests) == 3)
        late = asyncio.create_task(client.get(f"{upstream.url}/health", 5))
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert len(upstream.calls) == 3
        free.set()
        assert {answer.status for answer in await asyncio.gather(*calls, late)} == {200}


async def test_a_call_that_is_ended_closes_its_connection() -> None:
    async with Upstream(never_answers) as upstream:
        client = EngineClient(1)
        call = asyncio.create_task(client.get(f"{upstream.url}/health", HANG_S))
        await until(lambda: bool(upstream.requests))
        call.cancel()
        await until(upstream.calls[0].closed.is_set)
        # Its place is free again.
        second_task = asyncio.create_task(client.get(f"{upstream.url}/health", HANG_S))
        await until(lambda: len(upstream.requests) == 2)
        second_task.cancel()
        await asyncio.wait({second_task})


async def test_a_call_that_is_ended_ends_in_every_state() -> None:
    async with Upstream(never_answers) as upstream:
        for turns in range(60):
            call = asyncio.create_task(EngineClient(1).get(upstream.url, HANG_S))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            assert await asyncio.wait({call}, timeout=HANG_S) == ({call}, set())
            assert call.cancelled()
