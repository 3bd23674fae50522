"""Attackers of every kind that a test of the bytes knows, as traffic beside that of honest clients:
each opens a connection, attacks until it is turned away or ATTEMPT_S are over, and begins again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tests.hostile.corpus import body_for, request
from tests.hostile.extensions import CHUNKED, WEBSOCKET
from tests.hostile.forms import FormMutator
from tests.support.patience import hang_s

ADDRESS = "127.0.0.2"
ATTEMPT_S = 20.0
PAUSES_S = (0.1, 0.5)
"""Between two attempts: the machine's own cores are not the target."""
DRIP_S = 1.0
LARGE = 32 * 2**20


@dataclass(frozen=True)
class Target:
    """The gateway; `key` may ask for inference, of `model`."""

    port: int
    key: str
    model: str

    @property
    def authorization(self) -> bytes:
        return b"authorization: Bearer " + self.key.encode()


Attack = Callable[
    [Target, random.Random, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]
]


async def _drip(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, drops: bytes = b"a"
) -> None:
    """`head`, then one byte after the other, whatever is answered, until the connection is
    closed."""
    writer.write(head)
    task = asyncio.create_task(_note_answer(reader))
    try:
        for drop in itertools.cycle(drops):
            if (await asyncio.wait((task,), timeout=DRIP_S))[0]:
                break
            writer.write(bytes((drop,)))
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _note_answer(reader: asyncio.StreamReader) -> None:
    while await reader.read(65536):
        pass


async def _websocket(
    _: Target, __: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(request(b"", *WEBSOCKET, line=b"POST / HTTP/1.1", length=b"5"))
    await _note_answer(reader)


async def _trailers(
    _: Target, __: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(request(b"0\r\n", CHUNKED, line=b"POST /admin/models HTTP/1.1", length=None))
    for _number in range(64):
        writer.write(b"a: b\r\n" * 10_000)
        await writer.drain()
    await _note_answer(reader)


async def _tiny_chunks(
    _: Target, __: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(request(b"", CHUNKED, line=b"POST /admin/models HTTP/1.1", length=None))
    for _number in range(16):
        writer.write(b"1\r\na\r\n" * 10_000)
        await writer.drain()
    await _note_answer(reader)


async def _header_lines(
    _: Target, __: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 100_000)
    await _note_answer(reader)


async def _slow_body(
    _: Target, __: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await _drip(
        reader, writer, request(b"", line=b"POST /admin/models HTTP/1.1", length=b"30000000")
    )


async def _slow_head(
    _: Target, __: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await _drip(reader, writer, b"G", b"ET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100)


async def _pipeline(
    target: Target, _: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    slow = body_for(target.model, stream=True, max_tokens=2000)
    writer.write(request(slow, target.authorization))
    behind = request(body_for(target.model, padding="a" * (2**20 - 200)), target.authorization)
    for _number in range(15):
        writer.write(behind)
        await writer.drain()
    await _note_answer(reader)


async def _trickle(
    target: Target, _: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await _drip(
        reader, writer, request(b"a" * (2**20 + 5000), target.authorization, length=b"%d" % LARGE)
    )


_mutator = functools.cache(FormMutator)


async def _form(
    target: Target,
    random_: random.Random,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    head, _, rest = _mutator(target.model).mutate(random_).partition(b"\r\n")
    writer.write(head + b"\r\n" + target.authorization + b"\r\nconnection: close\r\n" + rest)
    await _note_answer(reader)


async def _slow_reader(
    target: Target, _: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(
        request(body_for(target.model, stream=True, max_tokens=2000), target.authorization)
    )
    while await reader.read(16):
        await asyncio.sleep(DRIP_S)


async def _wrong_key(
    _: Target, random_: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    for _number in range(5):
        key = b"authorization: Bearer fs-%032x" % random_.getrandbits(128)
        writer.write(request(b"", key, line=b"GET /v1/models HTTP/1.1", length=None))
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(PAUSES_S[0])


KINDS: dict[str, Attack] = {
    "websocket upgrades": _websocket,
    "trailers": _trailers,
    "tiny chunks": _tiny_chunks,
    "header lines": _header_lines,
    "slow bodies without a key": _slow_body,
    "slow heads": _slow_head,
    "pipelined memory": _pipeline,
    "large bodies that trickle": _trickle,
    "forms": _form,
    "slow readers": _slow_reader,
    "wrong keys": _wrong_key,
}


async def _attacker(
    target: Target, kind: str, random_: random.Random, attempts: Counter[str]
) -> None:
    while True:
        with contextlib.suppress(
            OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", target.port, local_addr=(ADDRESS, 0)
            )
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    await KINDS[kind](target, random_, reader, writer)
            finally:
                attempts[kind] += 1
                writer.transport.abort()
        await asyncio.sleep(random_.uniform(*PAUSES_S))


def attackers(target: Target, count: int, pipe: Connection) -> None:
    """A process of so many attackers of each kind.

    It ends when the pipe asks, once each kind has made an attempt: on a busy machine the first
    attempt of a process with idle priority may come late. Its answer is the attempts by kind.
    """
    # Attackers are on machines of their own: here they take the processor time that the gateway,
    # its engines and its honest clients leave.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    attempts: Counter[str] = Counter()

    async def run() -> None:
        tasks = [
            asyncio.create_task(
                _attacker(target, kind, random.Random(f"{kind} {number}"), attempts)
            )
            for kind in KINDS
            for number in range(count)
        ]
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hang_s()):
                while len(attempts) < len(KINDS):
                    await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(run())
    pipe.send(attempts)
