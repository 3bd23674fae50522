"""Answers of an engine that wishes others ill: none becomes the answer to somebody else's request,
and no part of one is without a bound."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from unittest import mock

import h11
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.proxy import head_cache
from tests.support.dataplane import CHAT, DONE, Gateway, model, raw_request
from tests.support.patience import HANG_S
from tests.support.upstream import Call, Upstream

EVIL = b"words of the hostile engine, of which there are a hundred bytes with the head before them"
HONEST = b"words of the honest engine"
INJECTED = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (
    len(EVIL),
    EVIL,
)
ID = b"x-request-id: the-same-for-all-0001\r\n"


def ask(name: str) -> bytes:
    return raw_request(b'{"model":"%b","messages":[]}' % name.encode()).replace(
        b"host: x\r\n", b"host: x\r\n" + ID
    )


@dataclass(frozen=True)
class Read:
    """An answer as a client reads it that knows nothing but RFC 9112."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    whole: bool


def read(data: bytes) -> list[Read]:
    """The answers in all that a connection gave. Raises h11.RemoteProtocolError for bytes that are
    no answer."""
    reader = h11.Connection(h11.CLIENT)
    events = [
        h11.Request(method="POST", target=CHAT, headers=[("host", "x"), ("content-length", "0")]),
        h11.EndOfMessage(),
    ]
    answers: list[Read] = []
    reader.receive_data(data)
    reader.receive_data(b"")
    while True:
        if not reader.trailing_data[0]:
            return answers
        for event in events:
            reader.send(event)
        head, body = reader.next_event(), b""
        assert isinstance(head, h11.Response), head
        headers = tuple(
            (name, value)
            for name, value in head.headers
            if name not in (b"transfer-encoding", b"content-length")
        )
        try:
            while isinstance(event := reader.next_event(), h11.Data):  # type: ignore[assignment]
                body += event.data
        except h11.RemoteProtocolError as error:
            if "closed" not in str(error):
                raise
            return [*answers, Read(head.status_code, headers, body, whole=False)]
        answers.append(Read(head.status_code, headers, body, whole=True))
        if reader.our_state is not h11.DONE or reader.their_state is not h11.DONE:
            assert not reader.trailing_data[0]
            return answers
        reader.start_next_cycle()


async def talk(gateway: Gateway, hostile: Callable[[Call], Awaitable[None]], count: int) -> bytes:
    """All answers to one client that asks the hostile engine `count` times, and then the honest
    engine of another model."""

    async def honest(call: Call) -> None:
        await call.reply(HONEST, headers="")

    async with Upstream(hostile) as evil, Upstream(honest) as good:
        gateway.route(
            model(evil.url, name="evil", served="evil"), model(good.url, name="good", served="good")
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(ask("evil") * count + ask("good"))
        data = b""
        while not data.endswith(HONEST) and (
            piece := await asyncio.wait_for(reader.read(2**16), HANG_S)
        ):
            data += piece
        # A connection that is kept is good for one more: nothing lay behind the last answer.
        if data.endswith(HONEST):
            writer.write(ask("good").replace(b"host: x", b"host: x\r\nconnection: close"))
            data += await asyncio.wait_for(reader.read(), HANG_S)
        writer.close()
        return data


def script(answers: list[list[bytes]]) -> Callable[[Call], Awaitable[None]]:
    """Gives each answer in its pieces; closes after the last, and after bytes that the gateway may
    take for no answer yet."""
    turn = 0

    async def run(call: Call) -> None:
        nonlocal turn
        pieces = answers[turn]
        turn += 1
        for piece in pieces:
            await call.send(piece)
            await asyncio.sleep(0)
        if turn == len(answers) or not re.search(rb"HTTP/1\.[01] [2-9]", b"".join(pieces)):
            call.close()

    return run


def judge(data: bytes, count: int) -> list[Read]:
    answers = read(data)
    assert len(answers) <= count + 2
    for at, answer in enumerate(answers):
        assert (HONEST in answer.body) == (at >= count), data
    if len(answers) > count:
        assert len(answers) == count + 2, data
    return answers


# --- whose answer it is ---

HEADS = [
    "content-length: %03d",
    "content-type: application/json\r\ncontent-length: %d",
    "content-length: %d\r\nx-y: z",
]
STATUSES = [
    *range(99, 105),
    150,
    199,
    200,
    201,
    *range(202, 208),
    226,
    299,
    300,
    301,
    304,
    400,
    404,
    429,
    500,
    599,
    600,
    999,
]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("status", STATUSES)
def test_an_answer_of_any_status_is_one_answer(gateway: Gateway, status: int, head: str) -> None:
    """Once with a body of no byte, so that the head is known if it ever is, and then with another
    answer for a body."""
    start = f"HTTP/1.1 {status:03d} X\r\n{head}\r\n\r\n".encode()
    answers = [[start % 0], [start % 5 + b"hello"], [start % len(INJECTED) + INJECTED]] * 2
    judge(asyncio.run(talk(gateway, script(answers), len(answers))), len(answers))


@pytest.mark.parametrize("status", [100, 102, 103, 150, 199, 204, 205, 304])
def test_an_answer_without_a_body_has_none_in_chunks_either(gateway: Gateway, status: int) -> None:
    start = (
        b"HTTP/1.1 %d X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        % status
    )
    answers = [
        [start + b"%x\r\n%b\r\n0\r\n\r\n" % (len(INJECTED), INJECTED)],
        [start, INJECTED],
        [start + b"0\r\n\r\n"],
    ]
    for answer in judge(asyncio.run(talk(gateway, script(answers), len(answers))), len(answers)):
        assert answer.status != 204 or (answer.body, answer.whole) == (b"", True)


def test_no_content_is_passed_on_without_a_length(gateway: Gateway) -> None:
    data = asyncio.run(
        talk(gateway, script([[b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n"]]), 1)
    )
    assert b"content-length" not in data.partition(b"\r\n\r\n")[0].lower()
    assert judge(data, 1)[0].status == 204


@pytest.mark.parametrize("length", [b"content-length: 5", b"transfer-encoding: chunked"])
def test_a_body_that_no_content_announced_is_no_part_of_the_next_answer(
    gateway: Gateway, length: bytes
) -> None:
    calls: list[Call] = []

    async def run(call: Call) -> None:
        calls.append(call)
        if len(calls) == 1:
            await call.send(b"HTTP/1.1 204 No Content\r\n%b\r\n\r\n" % length)
            return
        with suppress(OSError):
            await calls[0].send(b"5\r\nhello\r\n0\r\n\r\n" if b"chunked" in length else b"hello")
        await call.reply(b"fine", headers="")

    answers = judge(asyncio.run(talk(gateway, run, 2)), 2)
    assert [(answer.status, answer.body) for answer in answers[:2]] == [(204, b""), (200, b"fine")]


LINES = st.sampled_from(
    [
        b"content-type: application/json",
        b"content-type: text/event-stream",
        b"Connection: keep-alive",
        b"connection: close",
        b"connection: upgrade\r\nupgrade: h2c",
        b"x: content-length: 7",
        b"x: a\r\n content-length: 7",
        b"retry-after: 1",
        b"transfer-encoding: gzip",
        b"cache-control: a\xffb",
        b"x" * 300 + b": y",
    ]
)
LENGTHS = st.sampled_from(
    [
        b"content-length: %d",
        b"Content-Length:%03d",
        b"content-length: %d ",
        b"content-length:\t%05d",
    ]
)
VERSIONS = st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0"])
BODIES = st.one_of(
    st.binary(max_size=40), st.just(INJECTED), st.just(b"x" * 100), st.just(b"\r\n"), st.just(b"")
)
BEFORE = st.sampled_from(
    [
        b"",
        b"",
        b"",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\n",
        b"\r\n",
    ]
)


def chunk(body: bytes, extension: bytes, trailers: bytes) -> bytes:
    half = len(body) // 2
    chunks = b"".join(
        b"%x%b\r\n%b\r\n" % (len(part), extension, part)
        for part in (body[:half], body[half:])
        if part
    )
    return b"%b0\r\n%b\r\n" % (chunks, trailers)


@st.composite
def conversations(draw: st.DrawFn) -> list[list[bytes]]:
    """Answers with one head, but for its length, so that it is known when it comes again; the last
    may lie about its body."""
    status = draw(st.one_of(st.sampled_from([200, 200, 200, 400, 503]), st.sampled_from(STATUSES)))
    lines = draw(st.lists(LINES, max_size=3))
    length = draw(st.one_of(LENGTHS, LENGTHS, st.none()))
    if length is None:
        lines = [line for line in lines if not line.startswith(b"transfer-encoding")]
    lines.insert(draw(st.integers(0, len(lines))), length or b"transfer-encoding: chunked")
    start = b"%b %03d X\r\n%b\r\n\r\n" % (draw(VERSIONS), status, b"\r\n".join(lines))
    answers = []
    count = draw(st.integers(2, 5))
    for turn in range(count):
        body = draw(BODIES)
        last = turn == count - 1
        if length is None:
            extension = draw(st.sampled_from([b"", b";a", b';a="b"']))
            trailers = draw(st.sampled_from([b"", b"x: y\r\n", b"content-type: text/plain\r\n"]))
            answer = start + chunk(body, extension, trailers)
        else:
            stated_length = len(body) + (draw(st.sampled_from([0, 0, 0, -1, 1, 9])) if last else 0)
            answer = start % max(stated_length, 0) + body
        answer = draw(BEFORE) + answer
        cuts = sorted(draw(st.sets(st.integers(1, len(answer) - 1), max_size=2)))
        answers.append([answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)])
    return answers


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations())
def test_a_known_head_changes_nothing_that_a_client_reads(
    gateway: Gateway, answers: list[list[bytes]]
) -> None:
    plain_answers = asyncio.run(talk(gateway, script(answers), len(answers)))
    with mock.patch.object(head_cache, "remember_answer", return_value=None):
        parsed_answers = asyncio.run(talk(gateway, script(answers), len(answers)))
    assert judge(plain_answers, len(answers)) == judge(parsed_answers, len(answers))


# --- how much of it there may be ---

CHUNKS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding:"
    b" chunked\r\n\r\n5\r\nhello\r\n"
)
FLOODS = {
    "trailers": (CHUNKS + b"0\r\n", b"content-type: a\r\n" * 4096),
    "one trailer": (CHUNKS + b"0\r\nx: ", b"x" * 65536),
    "an extension of a chunk": (CHUNKS + b"5;x=", b"x" * 65536),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"content-type: a\r\n" * 4096),
    "one header": (b"HTTP/1.1 200 OK\r\nx: ", b"x" * 65536),
    "a reason": (b"HTTP/1.1 200 ", b"x" * 65536),
    "answers before the answer": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2048),
    "hints before the answer": (b"", b"HTTP/1.1 103 Hints\r\ncontent-type: a\r\n\r\n" * 2048),
}
# More than all the buffers on the way take.
FLOOD_BYTES = 32 * 2**20


@pytest.mark.parametrize("name", FLOODS)
def test_the_bytes_around_a_body_are_bounded(gateway: Gateway, name: str) -> None:
    start, flood = FLOODS[name]
    calls: list[Call] = []

    async def run(call: Call) -> None:
        calls.append(call)
        await call.send(start)
        while not call.closed.is_set() and call.sent < FLOOD_BYTES:
            await call.send(flood)
        call.close()

    data = asyncio.run(talk(gateway, run, 1))
    assert calls[0].sent < FLOOD_BYTES
    [answer, *rest] = read(data)
    assert answer.status == (200 if start.startswith(CHUNKS) else 502)
    assert b"engine_error" in answer.body
    assert bool(rest) == (answer.status == 502)  # a stream that broke off ends its connection


def test_a_trailer_and_an_extension_reach_nobody_and_the_connection_lives_on(
    gateway: Gateway,
) -> None:
    last = b"%x;a=b\r\n%b\r\n" % (len(DONE), DONE)
    answer = CHUNKS + last + b"0\r\nx-trailer: 1\r\ncontent-type: text/plain\r\n\r\n"
    calls: list[Call] = []

    async def run(call: Call) -> None:
        calls.append(call)
        await call.send(answer)

    data = asyncio.run(talk(gateway, run, 3))
    assert [reply.body for reply in judge(data, 3)[:3]] == [b"hello" + DONE] * 3
    assert b"trailer" not in data
    assert b"text/plain" not in data
    assert len(set(map(id, calls))) == 1
