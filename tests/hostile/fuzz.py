"""The client that sends hostile bytes, and the judge of the results."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from tests.hostile.answers import PAUSE_S, Conversation, HostileEngine, answers, make_script
from tests.hostile.corpus import Seed, corpus
from tests.hostile.documents import changed_document, documents, plain
from tests.hostile.engine import LoggedEngine
from tests.hostile.extensions import pipelines, trailers, upgrades
from tests.hostile.forms import FormMutator
from tests.hostile.mutation import RequestMutator
from tests.hostile.strict import count_requests
from tests.support.patience import HANG_S

QUIET_S = 0.15
"""A client that has heard nothing for so long ends its sending side, and to the gateway it has left
then."""
PATIENCES_S = (QUIET_S, 2.0, 10.0, HANG_S)
"""A fault is tried again with more patience: a busy machine is not a fault of the gateway's."""
SENTINEL = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
"""Sent after a request: its answer ends the connection, so that nobody has to wait for bytes that
never come."""
MARKS_PER_LANE = 380_000
KINDS, SHARES = ("request", "document", "form", "answer"), (4, 3, 1, 2)
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")


@dataclass(frozen=True)
class Reply:
    """The answers on one connection: (status, whether an engine said it) of each answer. `rest` are
    bytes that are not HTTP."""

    answers: list[tuple[int, bool]]
    rest: bytes
    seconds: float
    hung: bool

    @property
    def from_engine(self) -> int:
        return sum(engine for _, engine in self.answers)


def read_answers(data: bytes) -> tuple[list[tuple[int, bool]], bytes]:
    """The answers in `data`, one after the other, and the bytes that belong to none."""
    answers: list[tuple[int, bool]] = []
    while data:
        head = STATUS.match(data)
        if head is None:
            return answers, data
        status, lines = int(head[1]), head[2].lower()
        answers.append((status, b"x-gateway-source: engine\r\n" in lines))
        data = data[head.end() :]
        length = re.search(rb"content-length: *(\d+)\r\n", lines)
        if b"transfer-encoding: chunked\r\n" in lines:
            end = re.match(rb"(?:[0-9a-f]+\r\n.*?\r\n)*?0\r\n\r\n", data, re.DOTALL | re.IGNORECASE)
            if end is None:
                # The answer breaks off in its body, as it must when the engine breaks off.
                return (
                    answers,
                    b"",
                )
            data = data[end.end() :]
        elif length is not None:
            data = data[int(length[1]) :]
        elif status != 304 and status >= 200:
            return answers, b""  # to the end of the connection
    return answers, b""


class QuietClient(asyncio.Protocol):
    """A connection that reads until the gateway closes. All being sent, it ends its sending side
    where nothing comes for `quiet_s`, and counts as hung after HANG_S more."""

    def __init__(self, quiet_s: float) -> None:
        self.received = bytearray()
        self.hung = False
        self._quiet_s = quiet_s
        self._loop = asyncio.get_running_loop()
        self.closed = self._loop.create_future()
        self._has_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def write(self, data: bytes, *, last: bool) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
            if last:
                self._wait()

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self._timer is not None:
            self._wait()

    def eof_received(self) -> None:
        self._close()

    def connection_lost(self, _: Exception | None) -> None:
        self._close()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_s = HANG_S if self._has_ended else self._quiet_s
        self._timer = self._loop.call_later(wait_s, self._fall_quiet)

    def _fall_quiet(self) -> None:
        if self._has_ended:
            self.hung = True
            self._close()
        elif not self._transport.is_closing():
            self._has_ended = True
            self._transport.write_eof()
            self._wait()

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport.abort()
        if not self.closed.done():
            self.closed.set_result(None)


async def send(
    port: int, data: bytes, *, quiet_s: float = QUIET_S, cuts: Sequence[int] = ()
) -> Reply:
    """Send `data`, with a pause at each of `cuts`, and read until the gateway closes; when nothing
    comes for `quiet_s`, say that no more will be sent."""
    began = time.monotonic()
    _, client = await asyncio.get_running_loop().create_connection(
        lambda: QuietClient(quiet_s), "127.0.0.1", port
    )
    for start, end in itertools.pairwise((0, *cuts, len(data))):
        if start:
            await asyncio.sleep(PAUSE_S)
        client.write(data[start:end], last=end == len(data))
    await client.closed
    answers, rest = read_answers(bytes(client.received))
    return Reply(answers, rest, time.monotonic() - began, client.hung)


def violations(data: bytes, reply: Reply, engine: LoggedEngine, asked_count: int) -> Iterator[str]:
    """The faults of one input to which the engine was asked `asked_count` times."""
    if reply.hung:
        yield f"no end within {HANG_S:g} s"
    if reply.rest:
        yield f"an answer that is not HTTP: {reply.rest[:200]!r}"
    for status, _ in reply.answers:
        if status >= 500 and status not in (502, 503):
            yield f"status {status}"
    # The answer to a request is lost when the next one in its pipeline is refused.
    if not reply.from_engine <= asked_count <= count_requests(data):
        yield (
            f"the engine was asked {asked_count} times for {reply.from_engine} answers and"
            f" {count_requests(data)} requests"
        )
    for wrong in engine.wrong:
        yield f"the engine got {wrong[:500]}"
    engine.wrong.clear()


async def judge(
    port: int,
    data: bytes,
    engine: LoggedEngine,
    *,
    asks: int | None = None,
    quiet_s: float = QUIET_S,
    cuts: Sequence[int] = (),
) -> tuple[Reply, list[str]]:
    """One input, and its faults. `asks`: how often the engine must be asked, where that is
    known."""
    reply, problems = None, []
    for patience_s in PATIENCES_S:
        if patience_s >= quiet_s:
            engine.questions.clear()
            engine.wrong.clear()
            reply = await send(port, data, quiet_s=patience_s, cuts=cuts)
            if patience_s > QUIET_S:
                await asyncio.sleep(0.2)  # bytes from before the close have come
            problems = list(violations(data, reply, engine, len(engine.questions)))
            if asks is not None and len(engine.questions) != asks:
                problems.append(
                    f"the engine was asked {len(engine.questions)} times, not {asks}: {reply}"
                )
            if not problems:
                break
    assert reply is not None
    return reply, problems


@dataclass
class Tally:
    """The findings of a run of many inputs."""

    inputs: Counter[str] = field(default_factory=Counter)  # by kind
    answered: Counter[str] = field(default_factory=Counter)  # answers of engines, by kind
    statuses: Counter[int] = field(default_factory=Counter)
    # The items are the seconds until the end of the connection, and the bytes sent.
    slowest: tuple[float, bytes] = (
        0.0,
        b"",
    )
    violations: list[tuple[str, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Lane:
    """The two engines that one lane asks for, and nobody else: which of them was asked by whom is
    known."""

    engine: LoggedEngine
    evil: HostileEngine


@contextlib.asynccontextmanager
async def lanes_of(count: int) -> AsyncIterator[list[Lane]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [
            Lane(
                await stack.enter_async_context(LoggedEngine(lane_name(number))),
                await stack.enter_async_context(HostileEngine(f"evil-{lane_name(number)}")),
            )
            for number in range(count)
        ]


def models_of(lanes: list[Lane]) -> dict[str, list[str]]:
    return {engine.model: [engine.url] for lane in lanes for engine in (lane.engine, lane.evil)}


class Inputs:
    """Mutated inputs for one model."""

    def __init__(self, model: str) -> None:
        self._requests = RequestMutator(every_request(model))
        self._documents = documents(model)
        self._forms = FormMutator(model)

    def make(self, kind: str, random_: random.Random) -> bytes:
        """The bytes of a request of that kind."""
        if kind == "request":
            return self._requests.mutate(random_)
        if kind == "document":
            return changed_document(random_, self._documents)
        return self._forms.mutate(random_)


async def fuzz(port: int, lanes: list[Lane], inputs: int, seed: int, tally: Tally) -> None:
    """Send mutated requests, documents and forms, and answer with mutated answers."""
    # Made before the first connection: the gateway closes one that is silent for long.
    lanes_and_inputs = [(lane, Inputs(lane.engine.model)) for lane in lanes]
    engine_answers = answers()

    async def run(number: int, lane: Lane, made_inputs: Inputs) -> None:
        random_ = random.Random(seed * 1000 + number)
        conversation = Conversation(port, lane.evil, lane.engine, number * MARKS_PER_LANE)
        for _ in range(inputs // len(lanes) + (number < inputs % len(lanes))):
            kind = random_.choices(KINDS, SHARES)[0]
            tally.inputs[kind] += 1
            if kind == "answer":
                script = make_script(random_, engine_answers)
                tally.violations += [
                    (text, repr(script).encode())
                    for text in await conversation.run(random_, script)
                ]
            else:
                await _judge_one(port, lane, random_, kind, made_inputs.make(kind, random_), tally)
            if len(tally.violations) > 50:
                break
        conversation.close()

    await asyncio.gather(
        *(run(number, *lane_and_inputs) for number, lane_and_inputs in enumerate(lanes_and_inputs))
    )


async def _judge_one(
    port: int, lane: Lane, random_: random.Random, kind: str, data: bytes, tally: Tally
) -> None:
    """One input, whole or in pieces, and mostly with a last request behind it."""
    data += SENTINEL if random_.random() < 0.9 else b""
    cuts: Sequence[int] = ()
    if random_.random() < 0.15 and data[1:]:
        cuts = sorted({random_.randrange(1, len(data)) for _ in range(random_.randint(1, 6))})
    reply, problems = await judge(port, data, lane.engine, cuts=cuts)
    tally.answered[kind] += reply.from_engine
    tally.slowest = max(tally.slowest, (reply.seconds, data))
    tally.statuses.update(status for status, _ in reply.answers)
    tally.violations += [(text, data) for text in problems]


def every_request(model: str) -> list[Seed]:
    return [
        *corpus(model),
        *upgrades(model),
        *trailers(model),
        *pipelines(model),
        *plain(model),
    ]


def lane_name(number: int) -> str:
    """Model names that no mutation of one turns into another."""
    return "lane-" + "abcdefghijklmnopqrstuvwxyz"[number] * 6
