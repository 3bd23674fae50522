"""The client that sends hostile bytes, and the judge of what came of them."""

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
from tests.hostile.engine import LoggedEngine
from tests.hostile.extensions import pipelines, trailers, upgrades
from tests.hostile.forms import forms, mutated_form
from tests.hostile.mutation import mutate
from tests.hostile.strict import count_requests
from tests.support.patience import HANG_S

QUIET_S = 0.15
"""A client that has heard nothing for so long ends its sending side, and to the gateway it has left
then."""
PATIENCES_S = (QUIET_S, 2.0, 10.0, HANG_S)
"""What is found wrong is asked again with more patience: a busy machine is no fault of the
gateway's."""
SENTINEL = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
"""Sent after a request: its answer ends the connection, so that nobody has to wait for what never
comes."""
MARKS_PER_LANE = 380_000
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")


@dataclass(frozen=True)
class Reply:
    """What came back on one connection: (status, whether an engine said it) of each answer. `rest`
    is what is no HTTP."""

    answers: list[tuple[int, bool]]
    rest: bytes
    seconds: float
    hung: bool

    @property
    def from_engine(self) -> int:
        return sum(engine for _, engine in self.answers)


def read_answers(data: bytes) -> tuple[list[tuple[int, bool]], bytes]:
    """The answers in `data`, one after the other, and what does not belong to any."""
    found: list[tuple[int, bool]] = []
    while data:
        head = STATUS.match(data)
        if head is None:
            return found, data
        status, lines = int(head[1]), head[2].lower()
        found.append((status, b"x-gateway-source: engine\r\n" in lines))
        data = data[head.end() :]
        length = re.search(rb"content-length: *(\d+)\r\n", lines)
        if b"transfer-encoding: chunked\r\n" in lines:
            end = re.match(rb"(?:[0-9a-f]+\r\n.*?\r\n)*?0\r\n\r\n", data, re.DOTALL | re.IGNORECASE)
            if end is None:
                return (
                    found,
                    b"",
                )  # broken off in its body, as it must be when the engine breaks off
            data = data[end.end() :]
        elif length is not None:
            data = data[int(length[1]) :]
        elif status != 304 and status >= 200:
            return found, b""  # to the end of the connection
    return found, b""


async def send(
    port: int, data: bytes, *, quiet_s: float = QUIET_S, cuts: Sequence[int] = ()
) -> Reply:
    """Send `data`, with a pause at each of `cuts`, and read until the gateway closes; when nothing
    comes for `quiet_s`, say that no more
    will be sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began, received, ended = time.monotonic(), bytearray(), False
    hung = False
    try:
        for start, end in itertools.pairwise((0, *cuts, len(data))):
            if start:
                await asyncio.sleep(PAUSE_S)
            writer.write(data[start:end])
        while True:
            try:
                async with asyncio.timeout(HANG_S if ended else quiet_s):
                    piece = await reader.read(65536)
            except TimeoutError:
                if ended:
                    hung = True
                    break
                ended = True
                writer.write_eof()
                continue
            if not piece:
                break
            received += piece
    except (ConnectionError, OSError):
        pass  # refused in the middle: what was answered until then counts
    finally:
        writer.transport.abort()
    answers, rest = read_answers(bytes(received))
    return Reply(answers, rest, time.monotonic() - began, hung)


def violations(data: bytes, reply: Reply, engine: LoggedEngine, asked: int) -> Iterator[str]:
    """What must not be, of one input to which the engine was asked `asked` times."""
    if reply.hung:
        yield f"no end within {HANG_S:g} s"
    if reply.rest:
        yield f"an answer that is not HTTP: {reply.rest[:200]!r}"
    for status, _ in reply.answers:
        if status >= 500 and status not in (502, 503):
            yield f"status {status}"
    # The answer to a request is lost when the next one in its pipeline is refused.
    if not reply.from_engine <= asked <= count_requests(data):
        yield (
            f"the engine was asked {asked} times for {reply.from_engine} answers and"
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
    """One input, and what of it must not be. `asks`: how often the engine must be asked, where that
    is known."""
    reply, found_violations = None, []
    for patience_s in PATIENCES_S:
        if patience_s >= quiet_s:
            engine.asked.clear()
            engine.wrong.clear()
            reply = await send(port, data, quiet_s=patience_s, cuts=cuts)
            if patience_s > QUIET_S:
                await asyncio.sleep(0.2)  # what the gateway wrote before it closed has come
            found_violations = list(violations(data, reply, engine, len(engine.asked)))
            if asks is not None and len(engine.asked) != asks:
                found_violations.append(
                    f"the engine was asked {len(engine.asked)} times, not {asks}: {reply}"
                )
            if not found_violations:
                break
    assert reply is not None
    return reply, found_violations


@dataclass
class Tally:
    """What a run of many inputs found."""

    inputs: Counter[str] = field(default_factory=Counter)  # by kind: request, form, answer
    answered: Counter[str] = field(default_factory=Counter)  # answers of engines, by kind
    statuses: Counter[int] = field(default_factory=Counter)
    slowest: tuple[float, bytes] = (
        0.0,
        b"",
    )  # seconds until the end of the connection, and what was sent
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


async def fuzz(port: int, lanes: list[Lane], inputs: int, seed: int, tally: Tally) -> None:
    """Send mutated requests and forms, and answer with mutated answers."""

    async def run(number: int, lane: Lane) -> None:
        random_ = random.Random(seed * 1000 + number)
        model = lane.engine.model
        requests, seeds, said = every_request(model), forms(model), answers()
        conversation = Conversation(port, lane.evil, lane.engine, number * MARKS_PER_LANE)
        for _ in range(inputs // len(lanes) + (number < inputs % len(lanes))):
            kind = random_.choices(("request", "form", "answer"), (6, 2, 2))[0]
            tally.inputs[kind] += 1
            if kind == "answer":
                script = make_script(random_, said)
                tally.violations += [
                    (text, repr(script).encode())
                    for text in await conversation.run(random_, script)
                ]
            else:
                data = (
                    mutate(random_, requests) if kind == "request" else mutated_form(random_, seeds)
                )
                data += SENTINEL if random_.random() < 0.9 else b""
                slow = random_.random() < 0.15
                cuts = (
                    sorted({random_.randrange(1, len(data)) for _ in range(random_.randint(1, 6))})
                    if slow and data[1:]
                    else ()
                )
                reply, found = await judge(port, data, lane.engine, cuts=cuts)
                tally.answered[kind] += reply.from_engine
                tally.slowest = max(tally.slowest, (reply.seconds, data))
                tally.statuses.update(status for status, _ in reply.answers)
                tally.violations += [(text, data) for text in found]
            if len(tally.violations) > 50:
                break
        conversation.close()

    await asyncio.gather(*(run(number, lane) for number, lane in enumerate(lanes)))


def every_request(model: str) -> list[Seed]:
    return [*corpus(model), *upgrades(model), *trailers(model), *pipelines(model)]


def lane_name(number: int) -> str:
    """Model names that no mutation of one turns into another."""
    return "lane-" + "abcdefghijklmnopqrstuvwxyz"[number] * 6
