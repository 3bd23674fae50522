"""The prepared processes of a data folder: which exist, which start to serve, and their limits.

    DATA/prepared/SLOT/    one for each environment of an engine, as inside/prepared_engine.py says.
                           `order.json` also has the engine and its environment, without a key

The slots of the last starts, and of announced ones, are prepared: at most `limit` of them, and only
while all engines listen and memory is free. A start whose environment does not agree, or that gets
no answer in time, is a plain start. So is the next start of a model whose forked engine ended
before it listened.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from pydantic import ConfigDict

from gateway.domain import PreparedView, Value
from gateway.domain.units import GIB
from gateway.hosts.process import open_files, procfs
from gateway.hosts.process.instance_records import Record
from gateway.hosts.process.prepared.fork_client import ForkClient, ForkedEngine
from gateway.hosts.process.prepared.process_start import ProcessStart, matches_environment
from gateway.logging import Logger
from gateway.machine.meminfo import MEMINFO, memory_sizes
from gateway.store import atomic_file

IDLE_S = 300
"""Seconds that a prepared process waits for the next gateway."""
TEND_S = 1.0
IMPORT_S = 900.0
"""Seconds that an import may take."""
WAIT_S = 2.0
"""Seconds that a start waits for the end of its process's imports."""
POLL_S = 0.05
RESTART_S = 10.0
"""Seconds between two processes of one slot."""
FREE_TO_PREPARE = 4 * GIB
FREE_TO_KEEP = GIB
MANY_NEW_MODULES = 30
"""So many modules that engines imported after their fork are worth another prepared process."""
MAX_LEARNED_MODULES = 20_000

_INSIDE = Path(__file__).parent
_BEGIN = (
    "import pathlib, sys; inside, folder, restarts = sys.argv[1:]; sys.path[:1] = [inside];"
    " from inside import prepared_engine as program; del sys.path[0];"
    " program.main(pathlib.Path(folder), int(restarts))"
)

log = Logger("fitserve.prepared")


class PreparedSpec(Value):
    """The specification of a prepared process, kept in its folder."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    engine: str
    identity: str
    code: str
    python: str
    modules: tuple[str, ...]
    env: dict[str, str]
    idle_s: float = IDLE_S


class PreparedEngines:
    """See the module's docstring. Methods block for at most some seconds, and raise no OSError."""

    def __init__(self, data: Path, limit: int) -> None:
        self._folder = data / "prepared"
        self._limit = limit
        self._lock = threading.Lock()
        self._clients: dict[str, ForkClient] = {}
        self._importing: dict[str, subprocess.Popen[bytes]] = {}
        self._children: list[subprocess.Popen[bytes]] = []
        """Processes of this gateway that have imported their engine, to be reaped."""
        self._begin_times: dict[str, float] = {}
        self._tended_at = 0.0
        self._broken: set[str] = set()
        """Slots whose process ended by itself."""
        self._distrusted: set[str] = set()
        """Models whose forked engine ended before it listened."""
        self._judged_engines: set[tuple[str, int | None]] = set()
        """Names and pids of engines that have listened, or ended before."""

    def request_process(self, start: ProcessStart) -> None:
        """Have a process prepared for this start by the next `refresh_processes`."""
        if start.module is None:
            return
        with self._lock:
            slot = self._matching_slot(start)
            if slot is None:
                self._remember_start(start)
            else:
                self._record_slot_use(slot)

    def fork(self, start: ProcessStart) -> ForkedEngine | None:
        """An engine forked for this start; None: a plain start is due."""
        if start.module is None:
            return None
        self._await_import(start)
        with self._lock:
            slot = self._matching_slot(start)
            if slot is None:
                self._remember_start(start)
                return None
            self._record_slot_use(slot)
            if start.model in self._distrusted:
                self._distrusted.discard(start.model)
                return None
            try:
                return self._clients[slot].fork(start)
            except (OSError, ValueError) as error:
                log.warning("prepared.refused", engine=start.engine, error=str(error))
                self._drop_process(slot)
                return None

    def refresh_processes(
        self, records: Iterable[Record], identities: Callable[[], Mapping[str, str]]
    ) -> None:
        """Prepare the engines that are due, and end the others. identities: reads engine ->
        environment."""
        if time.monotonic() - self._tended_at < TEND_S:
            return
        self._tended_at = time.monotonic()
        is_calm = self._distrust_models(records)
        with self._lock, suppress(OSError):
            if self._slots_by_use() or self._importing:
                self._tend_processes(identities(), is_calm=is_calm)

    def views(self) -> tuple[PreparedView, ...]:
        """The processes that answer."""
        with self._lock:
            for slot in self._slots_by_use():
                self._connect_slot(slot)
            return tuple(
                PreparedView(
                    engine=spec.engine,
                    pid=client.pid,
                    since=client.started_at,
                    modules=client.modules,
                    refused=client.refused_modules,
                    pss_bytes=client.pss_bytes,
                )
                for slot, client in sorted(self._clients.items())
                if client.is_alive and (spec := self._read_spec(slot)) is not None
            )

    def engines(self) -> frozenset[str]:
        """The engines whose next start may be forked."""
        with self._lock:
            specs = (
                self._read_spec(slot) for slot in self._slots_by_use() if self._connect_slot(slot)
            )
            return frozenset(spec.engine for spec in specs if spec is not None)

    def close(self) -> None:
        """Leave the processes. The processes end by themselves if no gateway comes."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()
            for process in (*self._importing.values(), *self._children):
                # Popen would warn of a child that outlives it.
                process.returncode = 0
            self._importing.clear()
            self._children.clear()

    # --- starts ---

    def _await_import(self, start: ProcessStart) -> None:
        """Wait while the process of this start imports, for a moment."""
        slot = start.slot(program_identity())
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with self._lock:
                process = self._importing.get(slot)
                if process is None or process.poll() is not None or self._connect_slot(slot):
                    return
            time.sleep(POLL_S)

    def _record_slot_use(self, slot: str) -> None:
        """Note a use of the slot. The last used ones are kept."""
        with suppress(OSError):
            os.utime(self._folder / slot / "order.json")

    def _matching_slot(self, start: ProcessStart) -> str | None:
        """The slot whose process may become this engine."""
        wanted_slot = start.slot(program_identity())
        slots = [wanted_slot, *(slot for slot in self._slots_by_use() if slot != wanted_slot)]
        for slot in slots:
            spec = self._read_spec(slot)
            client = self._connect_slot(slot)
            if (
                spec is not None
                and client is not None
                and (spec.engine, spec.identity, spec.code, spec.python)
                == (start.engine, start.identity, program_identity(), start.argv[0])
                and client.cgroup == _own_cgroup()
                and matches_environment(spec.env, start, client.read)
            ):
                return slot
        return None

    def _remember_start(self, start: ProcessStart) -> None:
        """Remember the start, so that the next one like it is forked."""
        spec = PreparedSpec(
            engine=start.engine,
            identity=start.identity,
            code=program_identity(),
            python=start.argv[0],
            modules=(start.module,) if start.module else (),
            env=start.open_env,
        )
        slot = start.slot(spec.code)
        with suppress(OSError):
            (self._folder / slot).mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._read_spec(slot) != spec:
                self._drop_process(slot)
                self._broken.discard(slot)
                path = self._folder / slot / "order.json"
                atomic_file.write(path, spec.model_dump_json().encode())
        self._record_slot_use(slot)

    def _distrust_models(self, records: Iterable[Record]) -> bool:
        """Distrust models whose forked engine ended early. Returns whether all engines listen."""
        engines = {(record.name, record.pid): record for record in records}
        self._judged_engines &= engines.keys()
        new_records = {
            key: record for key, record in engines.items() if key not in self._judged_engines
        }
        # The kernel lists the ports of all connections of the machine too.
        listening = procfs.listening_ports() if new_records else set()
        for key, record in new_records.items():
            if record.has_exited and record.is_forked:
                self._distrusted.add(record.model)
            if record.has_exited or record.port in listening:
                self._judged_engines.add(key)
        return engines.keys() <= self._judged_engines

    # --- processes ---

    def _tend_processes(self, identities: Mapping[str, str], *, is_calm: bool) -> None:
        """Drop broken and needless processes, and start missing ones while the machine is calm."""
        for slot, process in list(self._importing.items()):
            is_late = time.monotonic() - self._begin_times[slot] > IMPORT_S
            if is_late:
                process.kill()
                process.wait()
            if process.poll() is not None:
                del self._importing[slot]
                # A killed process, such as by Linux for lack of memory, may do better later.
                if is_late or process.returncode != -signal.SIGKILL:
                    self._broken.add(slot)
                log.warning("prepared.failed", slot=slot, code=process.returncode)
        self._children = [process for process in self._children if process.poll() is None]
        due = self._due_slots(identities)
        missing_slots = due if available_bytes() >= FREE_TO_KEEP else []
        for slot in self._slots_by_use():
            client = self._connect_slot(slot)
            if slot not in missing_slots:
                self._drop_process(slot)
                if slot not in due:
                    shutil.rmtree(self._folder / slot, ignore_errors=True)
            elif client is not None and is_calm and self._has_learned(slot):
                self._drop_process(slot)
        for slot in missing_slots:
            is_due = (
                slot not in self._clients
                and slot not in self._broken
                and time.monotonic() - self._begin_times.get(slot, -RESTART_S) >= RESTART_S
            )
            if (
                is_due
                and is_calm
                and not self._importing
                and available_bytes() > FREE_TO_PREPARE
                and not self._imports_elsewhere(slot)
            ):
                self._start_process(slot)

    def _imports_elsewhere(self, slot: str) -> bool:
        """Whether the process of a killed gateway still imports for this slot, and is to be awaited
        instead of a second one. A process that takes too long is killed."""
        orphans = self._foreign_imports(slot)
        for process in orphans:
            if time.time() - procfs.began_at(process) > IMPORT_S:
                procfs.send(process, signal.SIGKILL)
        return bool(orphans)

    def _foreign_imports(self, slot: str) -> list[procfs.ProcessStat]:
        """Processes of other gateways that import for this slot: they have its log, and no
        socket yet."""
        folder = self._folder / slot
        return [] if (folder / "socket").exists() else procfs.writers(folder / "log")

    def _slots_by_use(self) -> list[str]:
        """The slots, the last used one first."""
        try:
            return sorted(
                (path.parent.name for path in self._folder.glob("*/order.json")),
                key=lambda slot: -(self._folder / slot / "order.json").stat().st_mtime_ns,
            )
        except OSError:
            return []

    def _due_slots(self, identities: Mapping[str, str]) -> list[str]:
        specs = {slot: self._read_spec(slot) for slot in self._slots_by_use()}
        return [
            slot
            for slot, spec in specs.items()
            if spec is not None
            and spec.code == program_identity()
            and identities.get(spec.engine) == spec.identity
        ][: self._limit]

    def _read_spec(self, slot: str) -> PreparedSpec | None:
        try:
            return PreparedSpec.model_validate_json(
                (self._folder / slot / "order.json").read_bytes()
            )
        except (OSError, ValueError):
            return None

    def _connect_slot(self, slot: str) -> ForkClient | None:
        client = self._clients.get(slot)
        if client is not None and client.is_alive:
            return client
        if client is not None:
            self._drop_process(slot)
        if not (self._folder / slot / "socket").exists():
            return None
        try:
            self._clients[slot] = ForkClient(self._folder / slot)
        except (OSError, ValueError):
            return None
        if (process := self._importing.pop(slot, None)) is not None:
            self._children.append(process)
        return self._clients[slot]

    def _start_process(self, slot: str) -> None:
        """Start the process of a slot, which imports the modules that earlier engines needed."""
        spec = self._read_spec(slot)
        folder = self._folder / slot
        if spec is None:
            return
        names = _learned_modules(folder)
        (folder / "learned").write_text("".join(f"{name}\n" for name in names))
        (folder / "used").write_text(str(len(names)))
        (folder / "socket").unlink(missing_ok=True)
        command = [spec.python, "-c", _BEGIN, str(_INSIDE), str(folder), "0"]
        with (folder / "log").open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=spec.env,
                start_new_session=True,
            )
        open_files.restore_fd_limit(process.pid)
        self._importing[slot] = process
        self._begin_times[slot] = time.monotonic()
        log.info("prepared.begun", engine=spec.engine, pid=process.pid)

    def _drop_process(self, slot: str) -> None:
        """End the process of a slot."""
        if (process := self._importing.pop(slot, None)) is not None:
            process.kill()
            process.wait()
        for orphan in self._foreign_imports(slot):
            procfs.send(orphan, signal.SIGKILL)
        if (client := self._clients.pop(slot, None)) is not None:
            client.stop()

    def _has_learned(self, slot: str) -> bool:
        """Whether engines imported much after their fork."""
        folder = self._folder / slot
        try:
            last_use = int((folder / "used").read_text())
        except (OSError, ValueError):
            return False
        return len(_learned_modules(folder)) >= last_use + MANY_NEW_MODULES


def _learned_modules(folder: Path) -> list[str]:
    """The modules that engines imported after their fork, each once."""
    try:
        names = (folder / "learned").read_text().split()
    except (OSError, UnicodeDecodeError):
        return []
    return list(dict.fromkeys(names))[:MAX_LEARNED_MODULES]


@cache
def program_identity() -> str:
    """The identity of the code inside prepared processes."""
    files = sorted((_INSIDE / "inside").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def available_bytes() -> int:
    """Memory that programs of this machine can still take."""
    return memory_sizes(MEMINFO.read_text()).get("MemAvailable", 0)


def _own_cgroup() -> str:
    return Path("/proc/self/cgroup").read_text()
