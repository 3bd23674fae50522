"""The in-memory twin of a host: same contract, no processes, faults on request.

    world = World()
    host = MemoryHost(lambda spec: EngineScript(exit_code=1), world)
    world.fail_next("start", HostError("The host is on fire."))

Engines that `serve` listen on real loopback sockets, so that a whole gateway runs over them within
one process. The `World` holds all that a real host keeps across a restart of the gateway; a new
MemoryHost on the same world adopts its engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Literal

from gateway.domain import (
    EngineProcess,
    EngineRef,
    Instance,
    LaunchSpec,
    PreparedView,
    StartConditions,
    StartOrigin,
)
from gateway.errors import Conflict, ForeignInstance, HostError
from gateway.hosts.host import MAX_LINE, Machines
from tests.contract.process_harness import free_port
from tests.support.scripted_engine import DEAF, EngineScript, FakeEngine

Method = Literal["prepare", "expect", "start", "list", "stop", "follow", "allocate_port"]
SIGKILLED = -9


class MemoryEngine:
    """One engine of the twin: its log, its exit code, and the server while it serves."""

    def __init__(
        self, spec: LaunchSpec, script: EngineScript, origin: StartOrigin | None = None
    ) -> None:
        self.spec = spec
        self.origin = origin
        self.script = script
        self.log: list[bytes] = []
        self.exit_code: int | None = None
        self.change_event = asyncio.Event()
        self.main_runs = True
        self.workers = script.workers
        self.task = asyncio.ensure_future(self._run())

    @property
    def members(self) -> int:
        """How many processes the engine would have."""
        return self.main_runs + self.workers

    @property
    def instance(self) -> Instance:
        spec = self.spec
        return Instance(
            name=spec.name,
            model=spec.model,
            attempt=spec.attempt,
            fingerprint=spec.fingerprint,
            state="running" if self.main_runs else "exited",
            url=f"http://127.0.0.1:{spec.port}" if self.main_runs else None,
            exit_code=self.exit_code,
            origin=self.origin,
        )

    def say(self, line: str) -> None:
        self.log.append(line.encode(errors="surrogateescape")[:MAX_LINE])
        self._wake()

    def kill(self) -> None:
        """As SIGKILL from outside does to the main process; workers live on."""
        self._exit(SIGKILLED)

    async def end(self, grace_s: float) -> None:
        """As SIGTERM does, then SIGKILL to the whole family after `grace_s`."""
        if self.main_runs and self.script.ignore_term:
            self.say(DEAF)
        elif self.main_runs:
            self._exit(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.members:
                    await self.change_event.wait()
        self._exit(SIGKILLED)
        self.workers = 0
        await asyncio.wait({self.task})

    async def _run(self) -> None:
        try:
            await self._play(self.script)
        except OSError as error:
            self.say(f"OSError: {error}")
            self._exit(1)

    async def _play(self, script: EngineScript) -> None:
        for delay_s, line in script.lines:
            if delay_s:
                await asyncio.sleep(delay_s)
            self.say(line)
        if script.exit_code is None or script.exit_after_s:
            await asyncio.sleep(script.start_delay_s)
            if script.serve:
                async with FakeEngine(script, self.say, port=self.spec.port) as engine:
                    await self._until_exit(engine)
            else:
                await self._until_exit(None)
        if script.last_words:
            self.say(script.last_words)
        self._exit(script.exit_code or 0)

    async def _until_exit(self, engine: FakeEngine | None) -> None:
        if engine is not None and self.script.crash_tools:
            await engine.exit.wait()
        elif self.script.exit_code is None:
            await asyncio.Event().wait()
        await asyncio.sleep(self.script.exit_after_s)

    def _exit(self, code: int) -> None:
        if self.main_runs:
            self.main_runs = False
            self.exit_code = code
            if self.task is not asyncio.current_task():
                self.task.cancel()
            self._wake()

    def _wake(self) -> None:
        self.change_event.set()
        self.change_event = asyncio.Event()


class World:
    """The state that outlives the gateway: engines, logs, names of other owners, and future faults.

    `installed`: engines ("kind==version") that can be prepared; None: all.
    """

    def __init__(self, installed: set[str] | None = None) -> None:
        self.installed = installed
        self.engines: dict[str, MemoryEngine] = {}
        self.logs: dict[str, MemoryEngine] = {}
        self.foreign: set[str] = set()
        self.pull: tuple[tuple[float, str], ...] = ()
        """(seconds before, words): the reports of the next `prepare`, as of the pull of an
        image."""
        self.code: Callable[[str, bytes], AsyncGenerator[bytes, None]] | None = None
        """Engine name -> the answers of its code to a document of questions; None: no code."""
        self.build = "the code"
        """The identity of the engines' code; other code has another identity."""
        self.images: dict[str, str] = {}
        """Image name -> present digest; other images are unknown."""
        self.conditions: dict[str, StartConditions] = {}
        """By engine the conditions of its next start, if not those of a new process."""
        self.prepared: tuple[PreparedView, ...] = ()
        self.expected: list[LaunchSpec] = []
        """The starts that were announced."""
        self._faults: dict[str, list[Exception]] = {}

    def fail_next(self, method: Method, error: Exception) -> None:
        """The next call of `method` raises `error`; several queue up."""
        self._faults.setdefault(method, []).append(error)

    def check(self, method: Method) -> None:
        """Raise the fault that waits for `method`, if any."""
        if faults := self._faults.get(method):
            raise faults.pop(0)

    async def close(self) -> None:
        """End every engine at once."""
        for engine in (*self.engines.values(), *self.logs.values()):
            await engine.end(0)
        self.engines.clear()


class MemoryHost:
    """A host in memory. `script` gives the behaviour of a spec's engine; default: serve
    `spec.model`."""

    kind: str = "memory"
    can_fork = True
    machines: Machines | None = None

    def __init__(
        self, script: Callable[[LaunchSpec], EngineScript] | None = None, world: World | None = None
    ) -> None:
        self.world = world if world is not None else World()
        self._script = script or (lambda _spec: EngineScript())

    async def prepare(self, engine: EngineRef, report: Callable[[str], None]) -> None:
        self.world.check("prepare")
        if self.world.installed is not None and str(engine) not in self.world.installed:
            raise HostError(
                f"There is no engine {engine} in this world.", hint="Add it to World.installed."
            )
        pull, self.world.pull = self.world.pull, ()
        for delay_s, words in pull:
            await asyncio.sleep(delay_s)
            report(words)
        report(f"{engine} is there.")

    async def prepare_fork(self, spec: LaunchSpec) -> None:
        self.world.check("expect")
        self.world.expected.append(spec)

    async def start(self, spec: LaunchSpec) -> Instance:
        self.world.check("start")
        self._refuse_foreign(spec.name)
        twin = self.world.engines.get(spec.name)
        if twin is not None and twin.main_runs:
            if twin.spec.fingerprint != spec.fingerprint:
                raise Conflict(
                    f"{spec.name} already runs with other settings ({twin.spec.fingerprint}).",
                    hint="Stop that engine, then start this one.",
                )
            return twin.instance
        script = self._script(spec)
        origin = (await self.conditions(spec.engine, spec.cache)).origin
        engine = MemoryEngine(spec, replace(script, model=script.model or spec.model), origin)
        self.world.engines[spec.name] = self.world.logs[spec.name] = engine
        if twin is not None:
            await twin.end(0)
        return engine.instance

    async def list(self) -> list[Instance]:
        self.world.check("list")
        return [engine.instance for engine in self.world.engines.values()]

    async def stop(self, name: str, grace_s: float) -> None:
        self.world.check("stop")
        self._refuse_foreign(name)
        if engine := self.world.engines.get(name):
            await engine.end(grace_s)
            if self.world.engines.get(name) is engine:
                del self.world.engines[name]

    async def processes(self, name: str) -> tuple[EngineProcess, ...]:
        engine = self.world.engines.get(name)
        if engine is None:
            return ()
        taken_s = time.monotonic() if engine.script.spins else 0.0
        return tuple(EngineProcess(pid=pid + 1, cpu_s=taken_s) for pid in range(engine.members))

    async def conditions(self, engine: EngineRef, cache: str) -> StartConditions:
        start_conditions = self.world.conditions.get(str(engine), StartConditions(origin="process"))
        has_cache = cache in {log.spec.cache for log in self.world.logs.values()}
        return start_conditions.evolve(is_cache_empty=not (cache and has_cache))

    async def prepared_views(self) -> tuple[PreparedView, ...]:
        return self.world.prepared

    async def follow(self, name: str) -> AsyncGenerator[bytes, None]:
        self.world.check("follow")
        engine = self.world.logs.get(name)
        line_count = 0
        while engine is not None:
            change_event, has_ended = engine.change_event, not engine.main_runs
            for line in engine.log[line_count:]:
                yield line
                line_count += 1
            if has_ended and line_count == len(engine.log):
                return
            if not has_ended:
                await change_event.wait()

    async def allocate_port(self) -> int:
        self.world.check("allocate_port")
        return free_port()

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return engine.evolve(digest=engine.digest or self.world.images.get(engine.image or ""))

    async def identity(self, engine: EngineRef) -> str:
        if self.world.code is None:
            raise HostError(f"{engine} is pretended: it has no code to ask.")
        return engine.digest or f"{self.world.build} of {engine}"

    async def run_inquiry(
        self, engine: EngineRef, request: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        await self.identity(engine)
        assert self.world.code is not None
        async with aclosing(self.world.code(str(engine), request)) as lines:
            async for line in lines:
                yield line

    async def stop_command(self, names: Sequence[str]) -> Sequence[str]:
        return ("forget", *names)

    async def close(self) -> None:
        """Nothing to let go of: engines belong to the world."""

    def _refuse_foreign(self, name: str) -> None:
        if name in self.world.foreign:
            raise ForeignInstance(
                f"Somebody else holds the name {name}.", hint="Remove it, if nothing needs it."
            )
