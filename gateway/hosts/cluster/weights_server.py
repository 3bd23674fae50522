"""The calls about weights that a node answers: their files, the missing ones, and their bytes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator

from pydantic import ValidationError

from gateway.errors import AgentAway, HostError
from gateway.hosts.agent.calls import (
    ANSWER,
    Answer,
    ChunkAnswer,
    DoneAnswer,
    FailedAnswer,
    MissingCall,
    MissingFile,
    ProgressAnswer,
    ReceiveCall,
    SendCall,
    WeightsCall,
)
from gateway.hosts.cluster.weights_store import CopyWriter, WeightsStore, read_chunk

_REPORT_S = 1.0
# A machine that sends nothing for so long has hung.
_SILENCE_S = 60.0


class WeightsServer:
    """Answers calls about the commits of a store. Disks are read and written by threads."""

    def __init__(self, store: WeightsStore) -> None:
        self._store = store

    async def answers(
        self, call: WeightsCall | MissingCall | SendCall
    ) -> AsyncGenerator[Answer, None]:
        """Answer the calls of copies. Raises HostError and AgentRefusal."""
        match call:
            case WeightsCall():
                yield DoneAnswer(files=await asyncio.to_thread(self._store.files, call))
            case MissingCall():
                # The first answer comes before anything is read, and an answer after each file: a
                # caller can give up only a call that answers.
                yield ProgressAnswer(text="")
                await asyncio.to_thread(self._store.check, call, call.files)
                missing_files = list[MissingFile]()
                for file in call.files:
                    row = await asyncio.to_thread(self._store.missing_file, call, file)
                    if row is not None:
                        missing_files.append(row)
                    yield ProgressAnswer(text=file.name)
                if not missing_files:
                    await asyncio.to_thread(self._store.record_whole, call, call.files)
                yield DoneAnswer(missing=tuple(missing_files))
            case SendCall():
                position = call.offset
                sent_file = await asyncio.to_thread(self._store.open_file, call, call.name)
                try:
                    while chunk := await asyncio.to_thread(read_chunk, sent_file, position):
                        yield ChunkAnswer(data=base64.b64encode(chunk).decode())
                        position += len(chunk)
                finally:
                    await asyncio.to_thread(sent_file.close)
                yield DoneAnswer()

    async def receive(
        self, call: ReceiveCall, reader: asyncio.StreamReader
    ) -> AsyncGenerator[Answer, None]:
        """Write a file from the answers of another machine, and report its bytes.

        Raises HostError, and AgentAway where the other machine breaks off: the next call continues.
        """
        loop = asyncio.get_running_loop()
        yield ProgressAnswer(text=str(call.offset))
        copy = await asyncio.to_thread(self._store.writer, call, call.file, call.offset)
        try:
            report_at = loop.time()
            chunks = copy.read_beginning()
            while await asyncio.to_thread(next, chunks, None) is not None:
                if loop.time() >= report_at:
                    report_at = loop.time() + _REPORT_S
                    yield ProgressAnswer(text=str(copy.size))
            while (answer := await _next_answer(reader)) is not None:
                await asyncio.to_thread(_write_chunk, copy, answer)
                if loop.time() >= report_at:
                    report_at = loop.time() + _REPORT_S
                    yield ProgressAnswer(text=str(copy.size))
            await asyncio.to_thread(self._store.accept, call, copy)
        finally:
            await asyncio.to_thread(copy.close)
        yield DoneAnswer()


async def _next_answer(reader: asyncio.StreamReader) -> ChunkAnswer | None:
    """The next bytes; None: the file has ended. Raises AgentAway and AgentRefusal."""
    try:
        async with asyncio.timeout(_SILENCE_S):
            line = await reader.readuntil(b"\n")
        answer = ANSWER.validate_json(line)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise _broken_copy_error(type(error).__name__) from None
    except ValidationError:
        raise _broken_copy_error("its answer is malformed") from None
    if isinstance(answer, FailedAnswer):
        raise HostError(answer.message, hint=answer.hint)
    return answer if isinstance(answer, ChunkAnswer) else None


def _write_chunk(copy: CopyWriter, answer: ChunkAnswer) -> None:
    try:
        data = base64.b64decode(answer.data, validate=True)
    except ValueError:
        raise _broken_copy_error("its answer is malformed") from None
    copy.write(data)


def _broken_copy_error(reason: str) -> AgentAway:
    return AgentAway(
        f"The other machine broke off while it sent weights: {reason}.",
        hint="The next start continues the copy.",
    )
