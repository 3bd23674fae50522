"""Engines that misbehave: their answers, and the parts that clients may see.

On one connection a client asks a hostile engine once or more, then an honest one; half of the time
all at once. For any answer of the hostile engine, the honest one's answer comes whole and is its
own, no answer has bytes of another's, and every answer is HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.hostile.corpus import body_for, chunks, request
from tests.hostile.engine import LoggedEngine, answer_to, whole_answer
from tests.hostile.mutation import SHORT, mutate_bytes
from tests.support.patience import HANG_S, Patience, hang_s

MARK = b"<<THE-MARK>>"
"""Stands in an answer for the mark of its request, which is as long: seven digits that no change to
an answer makes."""
MARKS = re.compile(rb"<<E\d{7}>>")
STATUS = re.compile(
    rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:["
    rb" \t\x21-\x7e\x80-\xff]*\r\n)*)\r\n"
)
PAUSE_S = 0.002
CLOSES_S = 0.2
"""An engine that leaves its connection open closes it then: a waiting client's answer comes from
the gateway."""
FROM_ENGINE = re.compile(rb"\r\nx-gateway-source: engine\r\n").search
FRAMING = re.compile(rb"(?:^|\n)(content-length|transfer-encoding): ([^\r]*)\r")
AT_ONCE_BYTES = 32 * 1024
JSON = b"content-type: application/json"
EVENTS = b"content-type: text/event-stream"
CHUNKED = b"transfer-encoding: chunked"
EVIL = b'{"choices":[{"message":{"content":"%b"}}]}' % MARK
SMUGGLED = whole_answer(EVIL)
TOKENS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\n\r\n",
    b"\x00",
    b" ",
    b":",
    b";",
    b"0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.0 ",
    b"HTTP/1.1 ",
    b"content-length: 0\r\n",
    b"content-length: 7\r\n",
    CHUNKED + b"\r\n",
    b"transfer-encoding: identity\r\n",
    b"connection: close\r\n",
    b"connection: upgrade\r\nupgrade: h2c\r\n",
    b"100 Continue",
    b"204 No Content",
    b"304 Not Modified",
    b"101 Switching Protocols",
    b"content-encoding: gzip\r\n",
    b"\xed\xa0\x80",
    b'"\\ud800"',
    b"data: ",
    b"\n\n",
    b"ffffffffffffffff",
    b"-1",
    MARK,
    SMUGGLED,
)


def answer(status: bytes, *lines: bytes, body: bytes = b"", length: bytes | None = b"") -> bytes:
    """`length` b"": the right Content-Length; None: none."""
    head = [b"HTTP/1.1 " + status, *lines]
    if length is not None:
        head.append(b"content-length: " + (length or b"%d" % len(body)))
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def answers() -> list[bytes]:
    ok, no_content, no_change = b"200 OK", b"204 No Content", b"304 Not Modified"
    events = b"".join(
        b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % MARK for _ in range(3)
    )
    end_event = b"data: [DONE]\n\n"
    in_chunks, of_events = chunks(EVIL[:9], EVIL[9:]), chunks(events, end_event)
    headers = [b"x-%d: a" % number for number in range(3000)]
    return [
        answer(ok, JSON, body=EVIL),
        answer(ok, JSON, CHUNKED, body=in_chunks, length=None),
        answer(ok, EVENTS, CHUNKED, body=of_events, length=None),
        answer(ok, EVENTS, body=events + end_event),
        answer(ok, JSON, body=EVIL, length=None),
        answer(ok, JSON, b"connection: close", body=EVIL),
        answer(b"400 Bad Request", JSON, body=EVIL),
        answer(b"500 Internal Server Error", JSON, body=EVIL),
        # answers that have no body, and bring one
        answer(no_content),
        answer(no_content, length=b"0"),
        answer(no_content, length=b"000"),
        answer(no_content, JSON, body=EVIL),
        answer(no_content, JSON, body=SMUGGLED),
        answer(no_content, body=SMUGGLED, length=b"0"),
        answer(no_content, body=SMUGGLED, length=None),
        answer(no_content, CHUNKED, body=in_chunks, length=None),
        answer(no_content, CHUNKED, body=SMUGGLED, length=None),
        answer(no_content, EVENTS, CHUNKED, body=of_events, length=None),
        answer(no_content, EVENTS, body=SMUGGLED),
        answer(no_change),
        answer(no_change, JSON, body=SMUGGLED),
        answer(no_change, CHUNKED, body=in_chunks, length=None),
        answer(b"205 Reset Content", JSON, body=EVIL),
        answer(b"205 Reset Content", body=SMUGGLED, length=b"0"),
        # answers before the answer
        *(answer(b"100 Continue", length=None) * count + SMUGGLED for count in (1, 20, 5000)),
        *(
            answer(b"103 Early Hints", b"link: " + MARK, length=None) * count + SMUGGLED
            for count in (1, 2000)
        ),
        answer(b"100 Continue", body=SMUGGLED),
        answer(b"102 Processing", CHUNKED, body=SMUGGLED, length=None),
        answer(
            b"101 Switching Protocols",
            b"connection: upgrade",
            b"upgrade: websocket",
            body=SMUGGLED,
            length=None,
        ),
        answer(ok, JSON, b"connection: upgrade", b"upgrade: h2c", body=EVIL) + SMUGGLED,
        answer(b"100 Continue", length=None) * 3,
        # lengths that lie
        *(
            answer(ok, JSON, body=EVIL, length=length)
            for length in (b"0", b"3", b"9999", b"-1", b"+9", b"0x9", b"1e1", b"", b" ")
        ),
        answer(ok, JSON, body=EVIL, length=b"0%d" % len(EVIL)),
        answer(ok, JSON, body=EVIL, length=b"9" * 30),
        answer(ok, JSON, b"content-length: 5", body=EVIL),
        answer(ok, JSON, CHUNKED, body=in_chunks),
        answer(ok, JSON, CHUNKED, body=EVIL, length=None),
        answer(ok, JSON, b"transfer-encoding: gzip, chunked", body=in_chunks, length=None),
        answer(
            ok, JSON, CHUNKED, body=in_chunks.replace(b"9\r\n", b"ffffffff\r\n", 1), length=None
        ),
        answer(ok, JSON, CHUNKED, body=in_chunks.replace(b"9\r\n", b"5\r\n", 1), length=None),
        answer(ok, JSON, CHUNKED, body=chunks(EVIL, extension=b";a=" + b"b" * 9000), length=None),
        answer(ok, EVENTS, CHUNKED, body=of_events[:-5], length=None),
        # more than one answer
        *(
            answer(ok, JSON, body=EVIL) + rest
            for rest in (SMUGGLED, SMUGGLED * 20, b"garbage", b"\r\n", b"\x00", b"HTTP/1.1")
        ),
        *(
            answer(ok, JSON, CHUNKED, body=in_chunks + rest, length=None)
            for rest in (SMUGGLED, b"0\r\n\r\n", b"garbage")
        ),
        answer(ok, EVENTS, CHUNKED, body=of_events + SMUGGLED, length=None),
        # trailers
        answer(ok, JSON, CHUNKED, body=in_chunks[:-2] + b"x: %b\r\n\r\n" % MARK, length=None),
        answer(
            ok,
            JSON,
            CHUNKED,
            body=in_chunks[:-2] + b"content-length: 5\r\nconnection: close\r\n\r\n",
            length=None,
        ),
        answer(ok, EVENTS, CHUNKED, body=of_events[:-2] + b"a: b\r\n" * 40_000, length=None),
        answer(ok, JSON, CHUNKED, body=in_chunks[:-2] + b"a" * 200_000, length=None),
        # heads
        answer(ok, JSON, *headers, body=EVIL),
        answer(ok, JSON, b"x: " + b"a" * 200_000, body=EVIL),
        answer(ok, b"a" * 200_000),
        b"HTTP/1.1 200 " + b"O" * 200_000,
        b"H" * 200_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 40_000,
        b"\r\n" * 50_000,
        answer(ok, b"content-type: a\rb: c", body=EVIL),
        answer(ok, b"content-type: \xff\x00", body=EVIL),
        answer(ok, b"content-type: application/json\n set-cookie: a", body=EVIL),
        answer(ok, JSON, JSON, body=EVIL),
        answer(ok, JSON, b"retry-after: \r\n \r\n x", body=EVIL),
        answer(ok, JSON, b"x-gateway-source: gateway", body=EVIL),
        answer(ok, JSON, b"content-encoding: gzip", body=EVIL),
        answer(ok, JSON, b"cache-control: " + b"a" * 600, body=EVIL),
        *(
            answer(status, JSON, body=EVIL)
            for status in (b"000 ", b"099 x", b"199 x", b"299 x", b"302 Found", b"600 x", b"999 x")
        ),
        *(
            answer(status, JSON, body=EVIL)
            for status in (b"20 OK", b"2000 OK", b"-200 OK", b"OK", b"200", b"\xff")
        ),
        *(
            SMUGGLED.replace(b"HTTP/1.1", version, 1)
            for version in (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"ICY", b"http/1.1")
        ),
        EVIL,
        b"",
        b"\x00" * 1000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        SMUGGLED.replace(b"\r\n", b"\n"),
        SMUGGLED[:20],
        SMUGGLED[:-9],
        # bodies
        answer(
            ok,
            JSON,
            body=(
                b'{"choices":[{"message":{"content":"\\ud800"}}],'
                b'"usage":{"prompt_tokens":"\\udfff"}}'
            ),
        ),
        answer(
            ok,
            JSON,
            body=b'{"usage":{"prompt_tokens":-1e999,"completion_tokens":' + b"9" * 400 + b"}}",
        ),
        *(
            answer(ok, kind, body=body)
            for kind in (JSON, EVENTS)
            for body in (
                b'{"choices":[],"error":"%b","usage":{"prompt_tokens\xd3":"\\udfff"}}' % MARK,
                b'data: {"error":{"\xd3":1},"a":"%b"}\n\ndata: [DONE]\n\n' % MARK,
                b'{"usage":{"prompt_tokens":1,"completion_tokens":1},"a":' + b"[" * 15_000,
            )
        ),
        answer(
            ok,
            EVENTS,
            CHUNKED,
            body=chunks(b"data: \xed\xa0\x80\xff" * 9, b'data: {"usage":' + b"[" * 9000, b"\n\n"),
            length=None,
        ),
        answer(ok, EVENTS, CHUNKED, body=chunks(b"data: " + b"a" * 300_000), length=None),
        answer(ok, EVENTS, CHUNKED, body=chunks(*(b"\n" for _ in range(2000))), length=None),
    ]


@dataclass(frozen=True)
class Script:
    """The bytes of the engine, its pauses, and whether it closes then. Else it closes after
    CLOSES_S."""

    data: bytes
    cuts: tuple[int, ...]
    closes: bool


@dataclass
class HostileEngine(LoggedEngine):
    """Answers requests by `scripts`, in order; where there is none left, honestly."""

    scripts: deque[Script] = field(default_factory=deque)

    async def _answer(self, writer: asyncio.StreamWriter, body: bytes) -> bool:
        mark = MARKS.search(body)
        if mark is None:
            return await super()._answer(writer, body)
        script = self.scripts.popleft() if self.scripts else Script(SMUGGLED, (), closes=False)
        data = script.data.replace(MARK, mark[0])
        for start, end in itertools.pairwise((0, *script.cuts, len(data))):
            if start:
                await asyncio.sleep(PAUSE_S)
            if writer.is_closing():
                return False
            writer.write(data[start:end])
        if not script.closes:
            asyncio.get_running_loop().call_later(CLOSES_S, writer.close)
        return not script.closes


@dataclass(frozen=True)
class Received:
    """An answer as a strict client reads it. `whole`: it did not break off; `closes`: no other
    follows."""

    status: int
    head: bytes
    body: bytes
    whole: bool
    closes: bool


class NotHttp(Exception):
    pass


@dataclass(frozen=True)
class Question:
    """A request of a conversation. own: the mark of a question to the hostile engine."""

    body: bytes
    path: bytes = b"/v1/chat/completions"
    own_headers: bytes = b""

    @property
    def data(self) -> bytes:
        """The bytes of the request."""
        return request(self.body, line=b"POST " + self.path + b" HTTP/1.1")


def _prompts(mark: str) -> dict[str, dict[str, Any]]:
    """Paths of endpoints whose answers the gateway reads or translates, and the fields of a request
    with that mark."""
    messages = {"messages": [{"role": "user", "content": mark}]}
    return {
        "/v1/completions": {"prompt": mark},
        "/v1/responses": {"input": mark},
        "/v1/embeddings": {"input": mark},
        "/v1/messages": {**messages, "max_tokens": 5},
        "/api/chat": messages,
        "/api/generate": {"prompt": mark, "raw": True},
        "/api/embed": {"input": mark},
        "/api/embeddings": {"prompt": mark},
    }


async def receive(reader: asyncio.StreamReader) -> Received | None:
    """The next answer; None when there is none. Raises NotHttp, TimeoutError."""
    async with asyncio.timeout(hang_s()):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise NotHttp(f"an unfinished head: {error.partial[:300]!r}") from None
            return None
        except ConnectionError:
            return None
        match = STATUS.fullmatch(head)
        if match is None:
            raise NotHttp(f"no head of an answer: {head[:300]!r}")
        status, lines = int(match[1]), match[2].lower()
        closes = b"connection: close\r\n" in lines
        framing = FRAMING.findall(lines)
        lengths = [value for name, value in framing if name == b"content-length"]
        chunk_codings = (b"transfer-encoding", b"chunked") in framing
        if len(framing) > 1 or (framing and not chunk_codings and not lengths[0].isdigit()):
            raise NotHttp(f"framed twice: {head!r}")
        if status < 200:
            raise NotHttp(f"an answer before the answer: {head!r}")
        if status in (204, 304):
            if lengths or chunk_codings:
                raise NotHttp(f"a length of what has no body: {head!r}")
            return Received(status, head, b"", True, closes)
        body, whole = bytearray(), True
        try:
            if chunk_codings:
                while size := _size(await reader.readuntil(b"\r\n")):
                    body += await reader.readexactly(size)
                    _end(await reader.readexactly(2))
                _end(await reader.readexactly(2))
            elif lengths:
                body += await reader.readexactly(int(lengths[0]))
            else:
                body += await reader.read()
                closes = True
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            body += getattr(error, "partial", b"")
            whole, closes = False, True
        return Received(status, head, bytes(body), whole, closes)


def _size(line: bytes) -> int:
    if not re.fullmatch(rb"[0-9a-f]{1,8}\r\n", line):
        raise NotHttp(f"no size of a chunk: {line!r}")
    return int(line, 16)


def _end(end: bytes) -> None:
    if end != b"\r\n":
        raise NotHttp(f"no end of a chunk: {end!r}")


def make_script(random_: random.Random, seeds: list[bytes]) -> Script:
    """One of `seeds`, changed or not, in one piece or more."""
    data = random_.choice(seeds)
    if len(data) <= SHORT and random_.random() < 0.8:
        data = mutate_bytes(random_, data, [seed for seed in seeds if len(seed) <= SHORT], TOKENS)
    cuts = sorted(
        random_.randrange(len(data) + 1) for _ in range(random_.choice((0, 0, 0, 1, 2, 4)))
    )
    return Script(data, tuple(cuts), closes=random_.random() < 0.5)


def is_away(received: Received | None) -> bool:
    """Whether the gateway says that an engine missed its look."""
    return (
        received is not None
        and received.status == 503
        and b'"code":"model_not_ready"' in received.body
        and b"does not answer within" in received.body
    )


class Conversation:
    """A client that asks `evil`, then `good`, and keeps its connection as long as it may."""

    def __init__(self, port: int, evil: HostileEngine, good: LoggedEngine, first: int) -> None:
        """first: no other conversation has marks from here on, for some hundred thousand."""
        self._port = port
        self._evil = evil
        self._good = good
        self._numbers = itertools.count(first)
        self._late = self._lagging = False
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def run(self, random_: random.Random, script: Script) -> list[str]:
        """The faults in the answers to `script`."""
        evil = [self._evil_question(random_) for _ in range(random_.choice((1, 1, 2, 3)))]
        honest = Question(body_for(self._good.model, number=next(self._numbers)))
        questions = [*evil, honest]
        at_once = random_.random() < 0.5
        self._evil.scripts.extend([script] * len(evil))
        # Bytes that come on a connection once the next request was written to it, of this script or
        # the next, are the answer to that one: only of this model, and nobody can tell.
        before, self._lagging = self._lagging, bool(script.cuts) or len(script.data) > AT_ONCE_BYTES
        self._late = before or self._lagging
        differences: list[str] = []
        ask = self._all_at_once if at_once else self._one_by_one
        try:
            await ask(questions, differences)
        except NotHttp as error:
            differences.append(str(error))
        except TimeoutError:
            differences.append(f"no end within {HANG_S:g} s")
        self._evil.scripts.clear()
        if differences:
            self.close()  # later bytes on it are not a fault of the next script
            sources = [(question.path, question.body) for question in evil]
            differences = [f"{text}; at once {at_once}, asked {sources}" for text in differences]
        return differences

    def _evil_question(self, random_: random.Random) -> Question:
        mark = f"<<E{next(self._numbers):07d}>>"
        streams = {"stream": True} if random_.random() < 0.3 else {}
        if random_.random() < 0.5:
            return Question(
                body_for(self._evil.model, token=mark, **streams), own_headers=mark.encode()
            )
        path, fields = random_.choice([*_prompts(mark).items()])
        body = json.dumps({"model": self._evil.model, **fields, **streams})
        return Question(body.encode(), path.encode(), mark.encode())

    async def _one_by_one(self, questions: list[Question], differences: list[str]) -> None:
        for question in questions:
            reply = await self._when_ready(question, await self._ask(question))
            differences += self._judge(question, reply)

    async def _all_at_once(self, questions: list[Question], differences: list[str]) -> None:
        """A question without an answer, because the connection had to end, is asked no more, except
        of the honest engine."""
        reader, writer = await self._connection()
        writer.write(b"".join(question.data for question in questions))
        last_question = questions[-1]
        for question in questions:
            reply = await receive(reader)
            if reply is not None:
                differences += self._judge(question, await self._when_ready(question, reply))
            if reply is None or reply.closes:
                self.close()
                if reply is None or question is not last_question:
                    reply = await self._ask(last_question)
                    differences += self._judge(
                        last_question, await self._when_ready(last_question, reply)
                    )
                break

    async def _when_ready(self, question: Question, received: Received | None) -> Received | None:
        """The answer; asked again while the gateway says that the honest engine is away. On a busy
        machine the engine, which is part of this process, misses a look at its health."""
        patience = Patience()
        while is_away(received) and not question.own_headers and not patience.is_over():
            await asyncio.sleep(1)
            received = await self._ask(question)
        return received

    async def _ask(self, question: Question) -> Received | None:
        """The answer; asked again where the connection of the question before had ended by then."""
        reply = None
        for _ in range(2):
            is_open = self._writer is not None
            reader, writer = await self._connection()
            writer.write(question.data)
            reply = await receive(reader)
            if reply is None or reply.closes:
                self.close()
            if reply is not None or not is_open:
                break
        return reply

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self._reader, self._writer

    def _judge(self, question: Question, received: Received | None) -> Iterator[str]:
        if received is None:
            yield "no answer"
            return
        is_from_engine = bool(FROM_ENGINE(received.head))
        if not question.own_headers:
            whole = received.whole and received.body == answer_to(question.body)
            if received.status != 200 or not whole or not is_from_engine:
                yield f"the honest engine was asked, and the client got {received!r}"[:1000]
            return
        marks = set(MARKS.findall(received.head + received.body))
        if not self._late and (foreign_marks := marks - {question.own_headers}):
            yield f"words that were for another request: {foreign_marks}, in {received!r}"[:1000]
        # Ollama's API passes the engine's status on as an answer of the gateway.
        is_from_gateway = not is_from_engine and not question.path.startswith(b"/api/")
        if is_from_gateway and received.status >= 500 and received.status not in (502, 503):
            yield f"an error of the gateway: {received!r}"[:1000]
