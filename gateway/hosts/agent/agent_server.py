"""The agent: starts engines for a gateway over a Unix socket, as far as its policy allows.

Input is never trusted. A connection is one call: a line of limited length, within limited time,
from a process of this user. Beyond a number of connections new ones are closed, so a flood harms
nobody else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import os
import signal
import socket
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from pydantic import ValidationError

from gateway.domain import Engine, EngineRef, Instance, LaunchSpec, Mount
from gateway.domain.image_name import AllowedImages
from gateway.errors import (
    AgentAway,
    AgentRefusal,
    Conflict,
    FitserveError,
    ForeignInstance,
    HostError,
    NotFound,
    SettingsError,
)
from gateway.hosts.agent.calls import (
    CALL,
    MAX_BYTES_OF_CALL,
    Answer,
    Call,
    ConditionsCall,
    DoneAnswer,
    ExpectCall,
    FailedAnswer,
    FollowCall,
    IdentityCall,
    InquireCall,
    LineAnswer,
    ListCall,
    PortCall,
    PrepareCall,
    PreparedCall,
    ProcessesCall,
    ProgressAnswer,
    ReceiveCall,
    ResolveCall,
    StartCall,
    StopCall,
)
from gateway.hosts.agent.policy import MAX_INSTANCES, check_engine, check_gpus, check_launch
from gateway.hosts.agent.resolved_images import ResolvedImages
from gateway.hosts.host import Host
from gateway.hosts.peer import peer_user
from gateway.logging import Logger
from gateway.secret import REVEAL_CONTEXT

log = Logger("fitserve.agent")

# A gateway follows the log of each engine, and makes few other calls.
_MAX_CONNECTIONS = MAX_INSTANCES + 64
# A gateway writes its line immediately.
_LINE_S = 10.0
_BACKLOG = 64
# A config of 16 MB and the headers of half a million tensors.
_MAX_DOCUMENT_BYTES = 128 * 1024 * 1024
# Inquiries whose documents are in memory at the same time. Others wait with theirs packed.
_MAX_UNPACKED_DOCUMENTS = 3
# Unread reports of a pull. Only the last ones count.
_REPORTS = 16


class HostServer:
    """A host behind a socket. `_admit` is the policy of the server."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._connections: set[asyncio.Task[None]] = set()
        self._starting: set[str] = set()
        self._is_full = False
        self._documents = asyncio.Semaphore(_MAX_UNPACKED_DOCUMENTS)

    @asynccontextmanager
    async def serving(self, path: Path) -> AsyncIterator[None]:
        """Serve on the socket `path`, only for this user. Raises SettingsError if the socket
        cannot be made."""
        try:
            listener = listen(path)
        except OSError as error:
            raise SettingsError(
                f"The socket {path} cannot be made: {error.strerror or error}.",
                hint="Set FITSERVE_AGENT_SOCKET or FITSERVE_DATA_DIR to another path.",
            ) from None
        server = await asyncio.start_unix_server(
            self._serve_connection, sock=listener, limit=MAX_BYTES_OF_CALL, backlog=_BACKLOG
        )
        try:
            yield
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs this in a task
        self._connections.add(task)
        try:
            if self._admits(writer):
                with contextlib.suppress(OSError):
                    await self._answer_calls(reader, writer)
        except asyncio.CancelledError:
            # The end of `serving` cancels the connection. Python 3.11 would log a traceback for a
            # cancelled connection.
            pass
        except Exception:
            # A fault of the agent ends this connection, and no other.
            log.exception("a call failed unexpectedly")
        finally:
            await _close(writer)
            self._connections.discard(task)

    def _admits(self, writer: asyncio.StreamWriter) -> bool:
        is_full = len(self._connections) > _MAX_CONNECTIONS
        if is_full and not self._is_full:
            log.warning("too many connections", most=_MAX_CONNECTIONS)
        self._is_full = is_full
        if is_full:
            return False
        user = peer_user(writer.get_extra_info("socket"))
        if user not in (0, os.getuid()):
            log.warning("refused", reason="a process of another user", user=user)
            return False
        return True

    async def _answer_calls(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the call of one connection. A disconnection cancels the call."""
        try:
            async with asyncio.timeout(_LINE_S):
                line = await reader.readuntil(b"\n")
            call = CALL.validate_json(line, strict=True)
        except (TimeoutError, asyncio.IncompleteReadError):
            return
        except (asyncio.LimitOverrunError, ValidationError) as error:
            reason = (
                f"{error.error_count()} faults"
                if isinstance(error, ValidationError)
                else f"more than {MAX_BYTES_OF_CALL} bytes"
            )
            log.warning("refused", reason="an unknown call", why=reason)
            await _write_answer(
                writer,
                FailedAnswer(
                    error="AgentRefusal",
                    message="The agent refuses: the call is unknown.",
                ),
            )
            return
        if isinstance(call, ReceiveCall):
            # The file follows on the connection, and a disconnection ends the file.
            await self._work(call, self._receive(call, reader), writer)
            await _discard(reader)
            return
        working = asyncio.ensure_future(self._work(call, self._perform_call(call), writer))
        # A gateway that disconnects gives its call up. It sends nothing after the call.
        disconnection = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({working, disconnection}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnection.cancel()
            if not working.done():
                working.cancel()
            await asyncio.gather(disconnection, return_exceptions=True)
            with contextlib.suppress(asyncio.CancelledError):
                await working

    async def _work(
        self, call: Call, work: AsyncGenerator[Answer, None], writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with aclosing(work) as answers:
                async for answer in answers:
                    await _write_answer(writer, answer)
        except FitserveError as error:
            if isinstance(error, AgentRefusal):
                log.warning("refused", call=call.call, reason=error.message)
            elif not isinstance(call, ListCall):
                log.warning("failed", call=call.call, reason=error.message)
            await _write_answer(writer, _failed_answer(error))

    async def _admit(self, call: Call) -> None:
        """Refuse a call that is not allowed. Raises HostError."""

    async def _record_image(self, exact_ref: EngineRef) -> None:
        """Remember an image that was found under an allowed name. Raises HostError."""

    async def _perform_call(self, call: Call) -> AsyncGenerator[Answer, None]:
        await self._admit(call)
        match call:
            case PrepareCall(engine=engine):
                async with aclosing(self._prepare_engine(engine)) as reports:
                    async for report in reports:
                        yield report
                yield DoneAnswer()
            case FollowCall(name=name):
                async with aclosing(self._host.follow(name)) as lines:
                    async for line in lines:
                        yield LineAnswer(text=line.decode("latin-1"))
                yield DoneAnswer()
            case InquireCall(engine=engine, question_texts=packed_document, gpus=gpus):
                async with aclosing(self._inquire(engine, packed_document, gpus)) as answers:
                    async for answer in answers:
                        yield answer
                yield DoneAnswer()
            case ExpectCall() | StartCall() | StopCall() | ResolveCall():
                yield await self._change(call)
            case _:
                yield await self._look_up(call)

    async def _change(self, call: ExpectCall | StartCall | StopCall | ResolveCall) -> DoneAnswer:
        """The answer to a call that changes engines or the images that may be used. Raises
        HostError."""
        match call:
            case ExpectCall(spec=spec):
                await self._host.prepare_fork(spec)
                return DoneAnswer()
            case StartCall(spec=spec):
                return DoneAnswer(instances=(await self._start_engine(spec),))
            case StopCall(name=name, grace_s=grace_s):
                log.info("stopping", instance=name)
                await self._host.stop(name, grace_s)
                return DoneAnswer()
            case ResolveCall(engine=engine):
                exact_ref = await self._host.resolve(engine)
                await self._record_image(exact_ref)
                return DoneAnswer(engine=exact_ref)

    async def _look_up(self, call: Call) -> DoneAnswer:
        """The answer to a call that changes nothing. Raises HostError."""
        match call:
            case ListCall():
                return DoneAnswer(instances=tuple(await self._host.list()))
            case ProcessesCall(name=name):
                return DoneAnswer(processes=await self._host.processes(name))
            case ConditionsCall(engine=engine, cache=cache):
                return DoneAnswer(conditions=await self._host.conditions(engine, cache))
            case IdentityCall(engine=engine):
                return DoneAnswer(identity=await self._host.identity(engine))
            case PortCall():
                return DoneAnswer(port=await self._host.allocate_port())
            case PreparedCall():
                return DoneAnswer(prepared=await self._host.prepared_views())
            case _:
                raise _not_a_node_error()

    def _receive(
        self,
        call: ReceiveCall,
        reader: asyncio.StreamReader,  # noqa: ARG002
    ) -> AsyncGenerator[Answer, None]:
        """The answers to a call whose connection goes on with a file. Raises HostError."""
        return self._perform_call(call)

    async def _inquire(
        self, engine: EngineRef, packed_document: str, gpus: tuple[str, ...]
    ) -> AsyncGenerator[LineAnswer, None]:
        """The lines of an inquiry. Documents are large, so a few are unpacked, by threads."""
        async with self._documents:
            document = await asyncio.to_thread(_unpack, packed_document)
            async with aclosing(self._host.run_inquiry(engine, document, gpus)) as lines:
                async for line in lines:
                    yield LineAnswer(text=line.decode("latin-1"))

    async def _start_engine(self, spec: LaunchSpec) -> Instance:
        names = self._starting | {instance.name for instance in await self._host.list()}
        if len(names - {spec.name}) >= MAX_INSTANCES:
            raise AgentRefusal(
                f"The agent refuses: {MAX_INSTANCES} engines exist already.",
                hint="Remove a model first.",
            )
        log.info("starting", instance=spec.name, engine=str(spec.engine), gpus=spec.gpus)
        self._starting.add(spec.name)
        try:
            return await self._host.start(spec)
        finally:
            self._starting.discard(spec.name)

    async def _prepare_engine(self, engine: EngineRef) -> AsyncGenerator[ProgressAnswer, None]:
        reports: asyncio.Queue[str | None] = asyncio.Queue(_REPORTS)

        def report(text: str | None) -> None:
            if reports.full():
                reports.get_nowait()
            reports.put_nowait(text)

        preparation = asyncio.ensure_future(self._host.prepare(engine, report))
        preparation.add_done_callback(lambda _: report(None))
        try:
            while (text := await reports.get()) is not None:
                yield ProgressAnswer(text=text)
            await preparation
        finally:
            preparation.cancel()
            await asyncio.gather(preparation, return_exceptions=True)


class Agent(HostServer):
    """Starts engines for a gateway, as far as its policy allows.

    `engine` gives the profile of an engine by name, and raises NotFound.

    `models` is the mount of engines; `resolved_images` are the images found under allowed names;
    `trace_endpoint` is the only collector of engines.
    """

    def __init__(
        self,
        host: Host,
        engine: Callable[[str], Engine],
        models: Mount,
        allowed_images: AllowedImages,
        resolved_images: ResolvedImages,
        trace_endpoint: str = "",
    ) -> None:
        super().__init__(host)
        self._trace_endpoint = trace_endpoint
        self._engine = engine
        self._models = models
        self._allowed_images = allowed_images
        self._resolved_images = resolved_images

    async def _admit(self, call: Call) -> None:
        match call:
            case StartCall(spec=spec) | ExpectCall(spec=spec):
                profile = await self._engine_profile(spec.engine)
                check_launch(
                    spec,
                    profile,
                    self._models,
                    self._allowed_images,
                    self._resolved_images.digests,
                    trace_endpoint=self._trace_endpoint,
                )
            case (
                PrepareCall(engine=engine)
                | ConditionsCall(engine=engine)
                | ResolveCall(engine=engine)
                | IdentityCall(engine=engine)
                | InquireCall(engine=engine)
            ):
                profile = await self._engine_profile(engine)
                check_engine(engine, profile, self._allowed_images, self._resolved_images.digests)
                if isinstance(call, InquireCall):
                    check_gpus(call.gpus)
            case _:
                pass

    async def _record_image(self, exact_ref: EngineRef) -> None:
        await asyncio.to_thread(self._resolved_images.store, exact_ref)

    async def _engine_profile(self, engine: EngineRef) -> Engine:
        try:
            return await asyncio.to_thread(self._engine, str(engine))
        except NotFound as error:
            raise AgentRefusal(f"The agent refuses: {error.message}", hint=error.hint) from None


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection after its output, but wait only a limited time for its reader."""
    writer.close()
    try:
        async with asyncio.timeout(_LINE_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()


async def _discard(reader: asyncio.StreamReader) -> None:
    """Read to the end, for a limited time: a connection that is closed with unread bytes loses the
    answer."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINE_S):
            while await reader.read(MAX_BYTES_OF_CALL):
                pass


async def _write_answer(writer: asyncio.StreamWriter, answer: Answer) -> None:
    # The gateway calls engines by their keys.
    writer.write(answer.model_dump_json(context=REVEAL_CONTEXT).encode() + b"\n")
    await writer.drain()


def _not_a_node_error() -> AgentRefusal:
    return AgentRefusal(
        "The agent refuses: it is not a node of a cluster.",
        hint="Run `fitserve cluster join` on this machine.",
    )


def _unpack(text: str) -> bytes:
    """The unpacked document. Raises AgentRefusal if it is malformed, or larger than a model
    needs."""
    opener = zlib.decompressobj()
    try:
        document = opener.decompress(base64.b64decode(text, validate=True), _MAX_DOCUMENT_BYTES)
    except (ValueError, zlib.error):
        document = b""
    if not document or opener.unconsumed_tail:
        raise AgentRefusal(
            "The agent refuses: the document of questions is malformed.",
            hint="Gateway and agent must be of one version.",
        )
    return document


def _failed_answer(error: FitserveError) -> FailedAnswer:
    kinds = (AgentAway, AgentRefusal, ForeignInstance, Conflict, HostError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), HostError)
    return FailedAnswer.model_validate(
        {"error": kind.__name__, "message": error.message, "hint": error.hint}
    )


def stop_event() -> asyncio.Event:
    """An event of the running loop that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def listen(path: Path) -> socket.socket:
    """A listening socket, only for this user from the beginning. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    former_umask = os.umask(0o177)
    try:
        try:
            listener.bind(str(path))
        except OSError as error:
            # A previous agent has left the socket.
            if error.errno != errno.EADDRINUSE or not path.is_socket():
                raise
            path.unlink()
            listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(former_umask)
    return listener
