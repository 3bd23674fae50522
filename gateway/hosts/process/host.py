"""Engines as plain processes of this machine, each in the environment of its version.

    DATA/engines/KIND-VERSION/   the environment (`fitserve engine install` makes it)
    DATA/instances/NAME.json     the record: written before the spawn, and again with the pid.
                                 It holds the engine's key
    DATA/logs/NAME.log           the engine's output, kept after `stop`, trimmed in `list`
    DATA/run/NAME/               its working directory, empty at first
    DATA/caches/                 its compiled code and its HOME, as the user's HOME may hold secrets
    DATA/home/                   the HOME of an engine without a cache
    DATA/engine-secret           the secret that the keys of engines follow from
    DATA/prepared/               processes that have imported an engine, and fork the next ones

The engine listens on loopback, which every user of the machine reaches. So each engine gets a key
(engine_keys.py), and answers only with it. The key is in the environment or a file, never on the
command line, which every user can read.

An engine leads its own session, holds no pipe to the gateway, and is found by pid, start time and
boot. If a gateway died between spawn and record, the process that writes the log is the engine.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from gateway.domain import (
    EngineProcess,
    EngineRef,
    Instance,
    LaunchSpec,
    PreparedView,
    StartConditions,
)
from gateway.errors import ForeignInstance, HostError
from gateway.hosts.host import MAX_COMMAND, Machines, running_conflict_error
from gateway.hosts.process import open_files, procfs
from gateway.hosts.process.asked_environment import run_inquiry_process
from gateway.hosts.process.caches import Caches, is_empty
from gateway.hosts.process.cuda_compiler import build_variables
from gateway.hosts.process.engine_keys import EngineKeys
from gateway.hosts.process.instance_records import Record, Records, records_folder
from gateway.hosts.process.log_file import LogFileReader, trim
from gateway.hosts.process.prepared.pool import PreparedEngines
from gateway.hosts.process.prepared.process_start import ProcessStart
from gateway.machine.environment import (
    COMPLETE,
    engine_dir,
    installed_engines,
    is_installed,
    packages_identity,
    variables,
)
from gateway.secret import Secret
from gateway.store import atomic_file

POLL_S = 0.05
FOLLOW_S = 0.1
"""Seconds between looks at a log without new lines: ten such logs cost about 1 % of a core."""
RECORD_TIMEOUT_S = 1.0
"""Seconds that the exit code of a dead engine may take to be noted by its parent."""
KILL_S = 10.0
"""Seconds that SIGKILL may take. More means a process stuck in a driver."""

# Below the ports of outgoing connections (net.ipv4.ip_local_port_range): such a connection could
# take a port before the engine listens on it.
ENGINE_PORTS = range(20_000, 32_000)
_LOOPBACK_OPTION = "--host=127.0.0.1"
"""The address in the command of a process, as plans have it."""

P = ParamSpec("P")
T = TypeVar("T")


class ProcessHost:
    """See the module's docstring, and `host.py` for the contract."""

    kind: str = "process"
    machines: Machines | None = None

    def __init__(self, data_dir: Path, most_prepared: int = 0, address: str = "127.0.0.1") -> None:
        """Make a host whose engines are processes of this machine.

        most_prepared: most processes that have imported an engine, and fork the next ones.
        address: the only address on which engines listen.
        """
        data_dir = data_dir.absolute()
        self._data = data_dir
        self._address = address
        self._records = Records(records_folder(data_dir))
        self._unwritten_ends: dict[str, Record] = {}
        """Ended instances, by name, whose records the disk did not take."""
        self._logs = data_dir / "logs"
        self._run = data_dir / "run"
        self._home = data_dir / "home"
        self._caches = Caches(data_dir)
        self._keys = EngineKeys(data_dir / "engine-secret")
        self._prepared_engines = PreparedEngines(data_dir, most_prepared) if most_prepared else None
        self.can_fork = self._prepared_engines is not None
        self._id = hashlib.sha256(str(data_dir).encode()).hexdigest()[:12]
        self._names: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._lock = threading.RLock()
        """Held while a record is read, compared with its process and written back."""
        self._spawning: set[str] = set()
        self._given_ports: dict[int, None] = {}
        """Ports in the order of their allocation. Their engines have started by now, or never will,
        but a port is given again as late as possible."""

    # --- the contract ---

    async def prepare(self, engine: EngineRef, report: Callable[[str], None]) -> None:
        environment = engine_dir(self._data, engine)
        if not (environment / "bin/python").exists() or not is_installed(self._data, engine):
            raise HostError(
                f"{engine} is not installed on this machine: {environment} is not a complete"
                " environment.",
                hint=f"Run `fitserve engine install {engine}`.",
            )
        report(f"{engine} is installed.")

    async def prepare_fork(self, spec: LaunchSpec) -> None:
        if self._prepared_engines is not None:
            await run_to_end(self._expect, spec, self._prepared_engines)

    async def start(self, spec: LaunchSpec) -> Instance:
        async with self._name_lock(spec.name):
            record = await run_to_end(self._find_record, spec.name)
            if record is not None and not record.has_exited:
                if record.fingerprint != spec.fingerprint:
                    raise running_conflict_error(spec, record.fingerprint)
                return record.instance
            if record is not None:
                await self._stop_processes(record, grace_s=0)
            return (await run_to_end(self._spawn, spec)).instance

    async def list(self) -> list[Instance]:
        return [record.instance for record in await run_to_end(self._tend_and_list)]

    async def stop(self, name: str, grace_s: float) -> None:
        async with self._name_lock(name):
            record = await run_to_end(self._find_record, name)
            if record is not None:
                await self._stop_processes(record, grace_s)

    async def processes(self, name: str) -> tuple[EngineProcess, ...]:
        return await run_to_end(self._processes, name)

    async def conditions(self, engine: EngineRef, cache: str) -> StartConditions:
        return await run_to_end(self._conditions, engine, cache)

    async def prepared_views(self) -> tuple[PreparedView, ...]:
        return (
            await run_to_end(self._prepared_engines.views)
            if self._prepared_engines is not None
            else ()
        )

    async def follow(self, name: str) -> AsyncGenerator[bytes, None]:
        """The log, line by line. Ends immediately for a name that never ran. After `stop`, gives
        the whole log file."""
        async with self._name_lock(name):
            record = await run_to_end(self._find_record, name)
        try:
            reader = LogFileReader(self._log_path(name))
        except FileNotFoundError:
            return
        with reader:
            while True:
                has_ended = record is None or record.leader is None
                if reader.has_more():
                    for line in await asyncio.to_thread(reader.read):
                        yield line
                elif has_ended:
                    break
                else:
                    await asyncio.sleep(FOLLOW_S)
            if reader.partial:
                yield reader.partial

    async def allocate_port(self) -> int:
        # An engine may listen minutes after its start: allocated ports look free, but are not.
        used_ports = {record.port for record in await run_to_end(self._find_all)}
        first = int(self._id, 16) % len(ENGINE_PORTS)
        ports: list[int] = [*ENGINE_PORTS[first:], *ENGINE_PORTS[:first]]
        fresh_ports = [port for port in ports if port not in self._given_ports]
        for port in (*fresh_ports, *self._given_ports):
            if port not in used_ports and _is_port_free(self._address, port):
                self._given_ports.pop(port, None)
                self._given_ports[port] = None
                return port
        raise HostError(
            "No port is free for another engine.",
            hint=f"Stop programs that listen on {ENGINE_PORTS[0]} to {ENGINE_PORTS[-1]}.",
        )

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return engine

    async def identity(self, engine: EngineRef) -> str:
        return self._identity_of_engine(engine)

    def run_inquiry(
        self,
        engine: EngineRef,
        document: bytes,
        gpus: tuple[str, ...] = (),  # noqa: ARG002 - it sees all
    ) -> AsyncGenerator[bytes, None]:
        return run_inquiry_process(
            engine_dir(self._data, engine) / "bin/python", self._data / "asking", document
        )

    async def stop_command(self, names: Sequence[str]) -> Sequence[str]:
        pids = [process.pid for name in names for process in await self.processes(name)]
        return ("kill", *map(str, pids))

    async def close(self) -> None:
        """No connection to the engines exists. Prepared processes wait for the next gateway."""
        if self._prepared_engines is not None:
            await run_to_end(self._prepared_engines.close)

    def _identities(self) -> dict[str, str]:
        """The identity of each installed environment, by engine."""
        identities = {}
        for folder in installed_engines(self._data):
            kind, _, version = folder.rpartition("-")
            engine = EngineRef(kind=kind, version=version)
            with suppress(HostError):
                identities[str(engine)] = self._identity_of_engine(engine)
        return identities

    def _identity_of_engine(self, engine: EngineRef) -> str:
        environment = engine_dir(self._data, engine)
        if not is_installed(self._data, engine):
            raise HostError(
                f"{engine} is not installed on this machine.",
                hint=f"Run `fitserve engine install {engine}`.",
            )
        with raise_host_error():
            identity = f"{environment.name} of {(environment / COMPLETE).stat().st_mtime_ns}"
            packages = packages_identity(environment)
            return f"{identity} with {packages}" if packages else identity

    # --- records ---

    def _find_record(self, name: str) -> Record | None:
        """The instance as it is now. Raises ForeignInstance."""
        with raise_host_error(), self._lock:
            record = self._records.read(name)
            if record is None:
                return None
            return self._resolve_spawn(record) if record.pid is None else self._observe(record)

    def _tend_and_list(self) -> Sequence[Record]:
        """All instances, after a look at the prepared processes."""
        records = self._find_all()
        if self._prepared_engines is not None:
            self._prepared_engines.refresh_processes(records, self._identities)
        return records

    def _find_all(self) -> Sequence[Record]:
        records = []
        with raise_host_error(), self._lock:
            for name in self._records.names():
                with suppress(ForeignInstance):
                    record = self._find_record(name)
                    if record is not None and record.pid is not None:
                        records.append(record)
                        trim(self._log_path(name))
        return records

    def _processes(self, name: str) -> tuple[EngineProcess, ...]:
        record = self._find_record(name)
        family = record.family() if record is not None else []
        return tuple(
            EngineProcess(
                pid=process.pid,
                is_stopped=process.is_stopped,
                cpu_s=process.cpu_s,
                command=process.command(MAX_COMMAND),
            )
            for process in family
        )

    def _conditions(self, engine: EngineRef, cache: str) -> StartConditions:
        folder = self._caches.path(
            engine_dir(self._data, engine), self._identity_of_engine(engine), cache
        )
        forks = (
            self._prepared_engines is not None and str(engine) in self._prepared_engines.engines()
        )
        return StartConditions(
            origin="fork" if forks else "process",
            is_cache_empty=not cache or is_empty(folder),
        )

    def _resolve_spawn(self, record: Record) -> Record | None:
        """Complete a record without pid: it is being spawned now, or its gateway died meanwhile."""
        if record.name in self._spawning:
            return record
        while record.boot_id == procfs.boot_id() and (
            writers := procfs.writers(self._log_path(record.name))
        ):
            # A process still in the session of its gateway is between fork and exec, and soon
            # leaves it.
            if engines := [process for process in writers if process.session != record.born_in]:
                leader = procfs.read(engines[0].session)
                ticks = leader.start_ticks if leader is not None else 0
                return self._observe(
                    self._records.write(record.evolve(pid=engines[0].session, start_ticks=ticks))
                )
            time.sleep(POLL_S)
        self._forget_record(record)
        return None

    def _observe(self, record: Record) -> Record:
        """Compare the record with its process, and note an exit: an exit code can be read only
        once. Without space for the note, this process remembers it."""
        if record.has_exited or record.leader is not None:
            return record
        ended_record = self._unwritten_ends.get(record.name)
        if ended_record is None or (ended_record.pid, ended_record.start_ticks) != (
            record.pid,
            record.start_ticks,
        ):
            ended_record = self._complete_record(record)
        if not ended_record.has_exited:
            return record
        try:
            self._records.write(ended_record)
            self._unwritten_ends.pop(record.name, None)
        except OSError:
            self._unwritten_ends[record.name] = ended_record
        return ended_record

    def _complete_record(self, record: Record) -> Record:
        """The record of an instance without its leader, with its end if that is certain."""
        code = None
        process = record.holder
        if record.is_forked:
            code = self._exit_code(record)
        elif process is not None:
            has_ended, code = procfs.reap(process.pid)
            if not has_ended:
                return record
        return record.evolve(has_exited=True, exit_code=code)

    def _exit_code(self, record: Record) -> int | None:
        """The exit code of a forked engine. The engine's parent notes the code, and only then reaps
        it."""
        deadline = time.monotonic() + RECORD_TIMEOUT_S
        while record.holder is not None and time.monotonic() < deadline:
            if (code := self._records.exit_code(record)) is not None:
                return code
            time.sleep(POLL_S)
        return self._records.exit_code(record)

    def _forget_record(self, record: Record) -> None:
        with raise_host_error(), self._lock:
            if (process := record.holder) is not None:
                procfs.reap(process.pid)
            shutil.rmtree(self._run / record.name, ignore_errors=True)
            self._records.remove(record.name)
            self._unwritten_ends.pop(record.name, None)

    def _log_path(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    # --- processes ---

    def _start_command(self, spec: LaunchSpec, key: Secret | None) -> tuple[str, ...]:
        argv = tuple(
            f"--host={self._address}" if argument == _LOOPBACK_OPTION else argument
            for argument in spec.argv
        )
        if key is None or spec.key_option is None:
            return argv
        file = self._run / spec.name / "key.yaml"
        # Quotes keep a key from being read as a number.
        atomic_file.write(file, f'{spec.key_option}: "{key.reveal()}"\n'.encode())
        return (*argv, "--config", str(file))

    def _spawn(self, spec: LaunchSpec) -> Record:
        cache = self._cache_folder(spec) if spec.cache else None
        record = Record(
            name=spec.name,
            model=spec.model,
            attempt=spec.attempt,
            fingerprint=spec.fingerprint,
            port=spec.port,
            address=self._address,
            key=self._keys.key(cache) if spec.key_env or spec.key_option else None,
            cache=str(cache) if cache is not None else None,
            boot_id=procfs.boot_id(),
            born_in=os.getsid(0),
        )
        self._spawning.add(spec.name)
        try:
            with raise_host_error():
                return self._spawn_with_record(spec, record)
        finally:
            self._spawning.discard(spec.name)

    def _expect(self, spec: LaunchSpec, prepared_engines: PreparedEngines) -> None:
        with raise_host_error():
            self._home.mkdir(parents=True, exist_ok=True)
            inherited = (
                self._caches.make(self._cache_folder(spec), spec.caches) if spec.cache else {}
            )
            argv = self._start_command(spec, None)
            env = variables(argv[0], self._home) | inherited | _engine_variables(spec, None)
            env |= _build_variables(spec, env)
            prepared_engines.request_process(self._process_start(spec, argv, env))

    def _used_caches(self) -> set[Path]:
        """The caches of all engines of this gateway."""
        folders = set()
        for name in self._records.names():
            with suppress(ForeignInstance):
                record = self._records.read(name)
                if record is not None and record.cache is not None:
                    folders.add(Path(record.cache))
        return folders

    def _spawn_with_record(self, spec: LaunchSpec, record: Record) -> Record:
        """Start the engine, with its record on the disk before. Raises HostError."""
        for folder in (self._logs, self._home, self._run / spec.name):
            folder.mkdir(parents=True, exist_ok=True)
        inherited: dict[str, str] = {}
        if record.cache is not None:
            inherited = self._caches.make(Path(record.cache), spec.caches)
            self._caches.trim({Path(record.cache), *self._used_caches()})
        log = self._log_path(spec.name)
        log.unlink(missing_ok=True)
        self._records.write(record)
        child: subprocess.Popen[bytes] | None = None
        try:
            argv = self._start_command(spec, record.key)
            env = variables(argv[0], self._home) | inherited | _engine_variables(spec, record.key)
            env |= _build_variables(spec, env)
            if (forked := self._fork(spec, record, argv, env)) is not None:
                return forked
            # Several writers, and `trim`, can share the file only if all append.
            with log.open("ab") as output:
                child = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._run / spec.name,
                    env=env,
                    start_new_session=True,
                )
            open_files.restore_fd_limit(child.pid)
            process = procfs.read(child.pid)
            if process is None:
                raise ProcessLookupError(errno.ESRCH, "it ended before it was recorded")
            record = self._records.write(
                record.evolve(pid=process.pid, start_ticks=process.start_ticks)
            )
        except OSError as error:
            if child is not None:
                child.kill()
                child.wait()
            self._forget_record(record)
            raise HostError(
                f"{spec.argv[0]} could not be started: {error.strerror}.",
                hint=(
                    f"Run `fitserve engine install {spec.engine}`, and see that {self._run.parent}"
                    " can be written."
                ),
            ) from error
        # Popen would warn that its child outlives it, which is intended: `_observe` waits for the
        # pid.
        child.returncode = 0
        return record

    def _fork(
        self, spec: LaunchSpec, record: Record, argv: tuple[str, ...], env: dict[str, str]
    ) -> Record | None:
        """The record of an engine that a prepared process forked; None: a plain start is due.

        The engine begins after its record is on the disk. Raises OSError if that fails.
        """
        if self._prepared_engines is None:
            return None
        engine = self._prepared_engines.fork(self._process_start(spec, argv, env))
        if engine is None:
            return None
        with closing(engine):
            open_files.restore_fd_limit(engine.pid)
            process = procfs.read(engine.pid)
            if process is None:
                return None
            forked = record.evolve(pid=process.pid, start_ticks=process.start_ticks, is_forked=True)
            self._records.write(forked)
            try:
                engine.start_engine()
            except OSError:
                self._records.write(record)
                return None
        return forked

    def _process_start(
        self, spec: LaunchSpec, argv: tuple[str, ...], env: dict[str, str]
    ) -> ProcessStart:
        return ProcessStart(
            engine=str(spec.engine),
            identity=self._identity_of_engine(spec.engine),
            model=spec.model,
            argv=argv,
            env=env,
            key_env=spec.key_env,
            cwd=str(self._run / spec.name),
            log=str(self._log_path(spec.name)),
            exit_file=str(self._records.exit_file(spec.name)),
            forked_calls=spec.forked_calls,
            kernel_warmups=spec.kernel_warmups,
            kernel_builds=spec.kernel_builds,
        )

    def _cache_folder(self, spec: LaunchSpec) -> Path:
        return self._caches.path(
            engine_dir(self._data, spec.engine), self._identity_of_engine(spec.engine), spec.cache
        )

    async def _stop_processes(self, record: Record, grace_s: float) -> None:
        """Send SIGTERM to the main process, which ends its workers, or to the workers when it is
        gone. Then SIGKILL to all."""
        signalled: set[int] = set()
        start_s = time.monotonic()
        while family := await run_to_end(record.family):
            waited_s = time.monotonic() - start_s
            if waited_s > grace_s + KILL_S:
                stuck = ", ".join(str(process.pid) for process in family)
                raise HostError(
                    f"{record.name} does not end: process {stuck} survived SIGKILL for"
                    f" {KILL_S:g} s.",
                    hint=(
                        "It is probably stuck in the GPU driver; see the kernel log; a reboot"
                        " may be needed."
                    ),
                )
            if waited_s >= grace_s:
                for process in family:
                    procfs.send(process, signal.SIGKILL)
            else:
                leader = [process for process in family if process.pid == record.pid]
                for process in leader or family:
                    if process.pid not in signalled:
                        procfs.send(process, signal.SIGTERM)
                        signalled.add(process.pid)
            await asyncio.sleep(min(POLL_S, max(0.005, grace_s - waited_s)))
        await run_to_end(self._forget_record, record)

    def _name_lock(self, name: str) -> asyncio.Lock:
        """The lock that makes calls for one name wait for each other."""
        return self._names.setdefault(name, asyncio.Lock())


async def run_to_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread. A cancelled caller waits for its end, so that no work goes on after the lock
    is free."""
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(None, partial(function, *args, **kwargs))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        # Retrieved, or asyncio would call it lost.
        future.exception()
        raise


@contextmanager
def raise_host_error() -> Iterator[None]:
    """Turn an error of the operating system into a HostError."""
    try:
        yield
    except OSError as error:
        raise HostError(
            f"The process host cannot work: {error}.",
            hint="Free disk space or correct the folder's rights.",
        ) from error


def _engine_variables(spec: LaunchSpec, key: Secret | None) -> dict[str, str]:
    """Additional variables of the engine: its own, its GPUs, its key."""
    engine_env = {**spec.env, **_visible(spec.gpus)}
    return (
        {**engine_env, spec.key_env: key.reveal()}
        if key is not None and spec.key_env is not None
        else engine_env
    )


def _build_variables(spec: LaunchSpec, env: Mapping[str, str]) -> dict[str, str]:
    """Variables for the compiler of kernels, for an engine that builds some on a GPU."""
    return build_variables(env) if spec.kernel_builds and spec.gpus else {}


def _visible(gpus: Sequence[str]) -> dict[str, str]:
    """The variables that show a process only these GPUs."""
    return (
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    )


def _is_port_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
