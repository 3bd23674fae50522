"""Engines in containers, started by an agent over its Unix socket.

An unreachable agent stops nothing: engines run on, `list` raises, and `follow` waits and continues.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from pydantic import ValidationError

from gateway.domain import (
    EngineProcess,
    EngineRef,
    Instance,
    LaunchSpec,
    PreparedView,
    StartConditions,
)
from gateway.errors import (
    AgentAway,
    AgentRefusal,
    Conflict,
    FitserveError,
    ForeignInstance,
    HostError,
)
from gateway.hosts.agent.calls import (
    ANSWER,
    MAX_BYTES_OF_ANSWER,
    MAX_BYTES_OF_CALL,
    Answer,
    Call,
    ConditionsCall,
    DoneAnswer,
    FailedAnswer,
    FollowCall,
    IdentityCall,
    InquireCall,
    LineAnswer,
    ListCall,
    PrepareCall,
    ProcessesCall,
    ProgressAnswer,
    ResolveCall,
    StartCall,
    StopCall,
)
from gateway.hosts.docker.host import ENGINE_PORT
from gateway.hosts.host import Machines

# Inside the class `list` is the method.
Instances = list[Instance]

# Longer than the agent waits for Docker, so that its answer says why.
_PATIENCE_S = 30.0
_SLOW_CALL_TIMEOUT_S = 180.0
_RETRY_S = 1.0


class AgentHost:
    """See the module's docstring and `Host`."""

    kind: str = "docker"
    can_fork = False
    machines: Machines | None = None

    def __init__(
        self,
        path: Path,
        *,
        timeout_s: float = _PATIENCE_S,
        owner: str = "",
        preface: bytes = b"",
    ) -> None:
        """Make a host behind the agent at the socket `path`.

        owner: the installation of the gateway.
        preface: a line before each call, for the program at the socket.
        """
        self._path = path
        self._timeout_s = timeout_s
        self._owner = owner
        self._preface = preface

    async def prepare(self, engine: EngineRef, report: Callable[[str], None]) -> None:
        async with aclosing(self.answers(PrepareCall(engine=engine), None)) as answers:
            async for answer in answers:
                if isinstance(answer, ProgressAnswer):
                    report(answer.text)

    async def prepare_fork(self, spec: LaunchSpec) -> None:
        """Containers are not forked."""

    async def start(self, spec: LaunchSpec) -> Instance:
        (instance,) = (
            await self.final_answer(StartCall(spec=spec), _SLOW_CALL_TIMEOUT_S)
        ).instances
        return instance

    async def list(self) -> Instances:
        return [*(await self.final_answer(ListCall(), self._timeout_s)).instances]

    async def stop(self, name: str, grace_s: float) -> None:
        await self.final_answer(
            StopCall(name=name, grace_s=grace_s), grace_s + _SLOW_CALL_TIMEOUT_S
        )

    async def processes(self, name: str) -> tuple[EngineProcess, ...]:
        return (await self.final_answer(ProcessesCall(name=name), self._timeout_s)).processes

    async def conditions(self, engine: EngineRef, cache: str) -> StartConditions:
        call = ConditionsCall(engine=engine, cache=cache)
        return (await self.final_answer(call, self._timeout_s)).conditions

    async def prepared_views(self) -> tuple[PreparedView, ...]:
        return ()

    async def follow(self, name: str) -> AsyncGenerator[bytes, None]:
        line_count = 0
        while True:
            try:
                # The agent gives the log from its first line each time.
                passed_count = 0
                async with aclosing(self.answers(FollowCall(name=name), None)) as answers:
                    async for answer in answers:
                        if isinstance(answer, LineAnswer):
                            passed_count += 1
                            if passed_count > line_count:
                                line_count = passed_count
                                yield answer.text.encode("latin-1")
            except AgentAway:
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def allocate_port(self) -> int:
        return ENGINE_PORT

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return (
            await self.final_answer(ResolveCall(engine=engine), self._timeout_s)
        ).engine or engine

    async def identity(self, engine: EngineRef) -> str:
        return (await self.final_answer(IdentityCall(engine=engine), self._timeout_s)).identity

    async def run_inquiry(
        self, engine: EngineRef, document: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        packed_document = base64.b64encode(zlib.compress(document)).decode()
        if len(packed_document) > MAX_BYTES_OF_CALL // 2:
            raise HostError(
                "The model has too many tensors for a call to the agent.",
                hint="No action is needed: fitserve plans by its own rules.",
            )
        async with aclosing(
            self.answers(
                InquireCall(engine=engine, question_texts=packed_document, gpus=gpus), None
            )
        ) as answers:
            async for answer in answers:
                if isinstance(answer, LineAnswer):
                    yield answer.text.encode("latin-1")

    async def stop_command(self, names: Sequence[str]) -> Sequence[str]:  # noqa: ARG002
        # Only the agent knows the names of its containers.
        return ()

    async def close(self) -> None:
        """Nothing to close: every call has its own connection."""

    async def final_answer(self, call: Call, timeout_s: float | None) -> DoneAnswer:
        """The last answer to a call. Raises AgentAway, and failures reported by the agent."""
        final = DoneAnswer()
        async with aclosing(self.answers(call, timeout_s)) as answers:
            async for answer in answers:
                if isinstance(answer, DoneAnswer):
                    final = answer
        return final

    def answers(self, call: Call, silence_s: float | None) -> AsyncGenerator[Answer, None]:
        """The answers to a call, DoneAnswer as the last. Raises AgentAway, and failures reported by
        the agent."""
        return self._answers(self._preface + self._call_line(call), silence_s)

    def _call_line(self, call: Call) -> bytes:
        """The call of this gateway, as a line."""
        owned = call.evolve(owner=self._owner) if self._owner else call
        return owned.model_dump_json().encode() + b"\n"

    async def _answers(self, lines: bytes, silence_s: float | None) -> AsyncGenerator[Answer, None]:
        """The answers of the agent, DoneAnswer as the last. Raises AgentAway, and failures reported
        by the agent."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_unix_connection(
                    self._path, limit=MAX_BYTES_OF_ANSWER
                )
                writer.write(lines)
                await writer.drain()
            while True:
                async with asyncio.timeout(silence_s):
                    line = await reader.readline()
                if not line.endswith(b"\n"):
                    raise ConnectionError("it broke off")
                answer = ANSWER.validate_json(line)
                if isinstance(answer, FailedAnswer):
                    raise _answer_error(answer)
                yield answer
                if isinstance(answer, DoneAnswer):
                    return
        except FileNotFoundError:
            raise self._unreachable_error(f"there is no socket {self._path}") from None
        except PermissionError:
            raise self._unreachable_error(
                f"this user may not use the socket {self._path}"
            ) from None
        except TimeoutError:
            raise self._unreachable_error(f"it hangs, at {self._path}") from None
        except (OSError, ValueError, ValidationError) as error:
            raise self._unreachable_error(f"{error}, at {self._path}") from None
        finally:
            if writer is not None:
                writer.transport.abort()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    def _unreachable_error(self, reason: str) -> AgentAway:
        return AgentAway(
            f"The agent does not answer: {reason}.",
            hint=(
                "Start it (`fitserve agent`; with compose `docker compose up -d agent`), or set"
                " FITSERVE_AGENT_SOCKET to its socket."
            ),
        )


def _answer_error(failed_answer: FailedAnswer) -> FitserveError:
    kinds: tuple[type[HostError | Conflict], ...] = (
        AgentAway,
        AgentRefusal,
        Conflict,
        ForeignInstance,
        HostError,
    )
    kind = next(kind for kind in kinds if kind.__name__ == failed_answer.error)
    return kind(failed_answer.message, hint=failed_answer.hint)
