"""Many clients, half of which leave in the middle of an answer, while engines are killed; and the
same beside attackers of every kind.

`python -m benchmarks.hostile --parts crowd` prints the figures of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway, workers
from tests.hostile.attackers import Target, attackers
from tests.hostile.corpus import body_for, request
from tests.support.patience import HANG_S, Patience, hang_s, slowness
from tests.support.processor_time import ProcessorTime
from tests.support.running import model_folder

ADMIN = "an-admin-key-of-the-crowd-that-nobody-guesses"
TOKENS, TOKENS_PER_S = 10, 10
PAUSE_S = 2.0
"""The longest pause between two requests of a client."""
TIMEOUT_S = 60.0
REPLICAS = 2
SAMPLE_S = 1.0
WARM = 0.2
WARM_S = 60.0
"""Until then memory may grow: this share of a run, and at most so long."""


@dataclass
class ClientCounts:
    """Answers that clients saw. `first` and `whole`: seconds until the first byte and the last one,
    of answers that came whole."""

    # The keys are done, broken, refused with STATUS, left, cut and timeout.
    ended: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


@dataclass
class Figures:
    """Of one run. Descriptors: before the model was added, and after it was removed again.

    worker_mib: memory of each worker; empty where one process serves.
    processor: processor time of the clients, attackers, engines and each process of the gateway.
    """

    counts: ClientCounts
    attempts: Counter[str]
    kills: int
    resident_mib: list[float]
    descriptors: tuple[int, int]
    worker_mib: list[list[float]] = field(default_factory=list)
    processor: dict[str, ProcessorTime] = field(default_factory=dict)

    @property
    def growth(self) -> float:
        """Of the memory after it was warm: of the process that grew most."""
        return max(growth(sizes) for sizes in (self.resident_mib, *self.worker_mib))

    def each_minute(self) -> dict[str, list[int]]:
        """MiB of each process at the begin, and after each minute and the last sample."""
        step = round(60 / SAMPLE_S)
        processes = {"gateway": self.resident_mib} | {
            f"worker {number}": sizes for number, sizes in enumerate(self.worker_mib, 1)
        }
        return {
            name: [round(size) for size in (*sizes[:-1:step], sizes[-1])]
            for name, sizes in processes.items()
        }

    def p99_s(self) -> tuple[float, float]:
        """Until the first byte, and the last one."""
        return quantile(self.counts.first, 0.99), quantile(self.counts.whole, 0.99)


def growth(sizes: list[float]) -> float:
    """The last fifth of the settled sizes against the first."""
    settled = sizes[min(int(len(sizes) * WARM), round(WARM_S / SAMPLE_S)) :]
    part = max(1, len(settled) // 5)
    return statistics.mean(settled[-part:]) / statistics.mean(settled[:part]) - 1


def quantile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[int(share * len(seconds))] if seconds else math.inf


class Client:
    """One after the other, on one connection as long as it lives."""

    def __init__(
        self, target: Target, counts: ClientCounts, chance: random.Random, *, leaves: bool
    ) -> None:
        self._target = target
        self._counts = counts
        self._chance = chance
        self._leaves = leaves
        self._request = request(
            body_for(target.model, stream=True, max_tokens=TOKENS), target.authorization
        )
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(0, PAUSE_S))
            leaves_s = self._chance.uniform(0, TOKENS / TOKENS_PER_S) if self._leaves else None
            try:
                async with asyncio.timeout(TIMEOUT_S * slowness()):
                    outcome = await self._run_client(leaves_s)
            except TimeoutError:
                outcome = "timeout"
            except (OSError, asyncio.IncompleteReadError):
                outcome = "cut"
            if outcome != "done":
                self._close()
            self._counts.ended[outcome] += 1

    async def _run_client(self, leaves_s: float | None) -> str:
        began = time.monotonic()
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                "127.0.0.1", self._target.port
            )
        self._writer.write(self._request)
        try:
            async with asyncio.timeout(leaves_s):
                return await self._answer(self._reader, began)
        except TimeoutError:
            if leaves_s is None or time.monotonic() - began < leaves_s:
                raise
            return "left"

    async def _answer(self, reader: asyncio.StreamReader, began: float) -> str:
        head = await reader.readuntil(b"\r\n\r\n")
        first = time.monotonic() - began
        if not head.startswith(b"HTTP/1.1 200 "):
            return f"refused with {head[9:12].decode()}"
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            piece = await reader.read(65536)
            if not piece:
                return "cut"
            tail = (tail + piece)[-200:]
        if b"[DONE]" not in tail:
            return "broken"
        self._counts.first.append(first)
        self._counts.whole.append(time.monotonic() - began)
        return "done"

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None


def clients(target: Target, count: int, pipe: Connection) -> None:
    """A process of so many clients. It ends when the pipe asks, once an answer came whole and a
    client has left one: both may come late on a busy machine. Its answer is their counts."""
    observations = ClientCounts()

    async def run() -> None:
        members = [
            Client(target, observations, random.Random(number), leaves=number % 2 == 1)
            for number in range(count)
        ]
        tasks = [asyncio.create_task(client.run()) for client in members]
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hang_s()):
                while not observations.ended.keys() >= {"done", "left"}:
                    await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks), [
            task.exception() for task in tasks if not task.cancelled()
        ]

    asyncio.run(run())
    pipe.send(observations)


@contextlib.asynccontextmanager
async def process(run: Any, *arguments: object) -> AsyncIterator[tuple[int, list[Any]]]:
    """`run` in a process of its own, with a pipe on which it tells that it begins. Its pid, and a
    list that has its last message at the end."""
    parent_end, child_end = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=run, args=(*arguments, child_end), daemon=True
    )
    child.start()
    child_end.close()
    reports: list[Any] = []
    try:
        await asyncio.to_thread(parent_end.recv)  # it has begun
        assert child.pid is not None
        yield child.pid, reports
        parent_end.send(None)
        reports.append(await asyncio.to_thread(parent_end.recv))
    finally:
        child.kill()
        await asyncio.to_thread(child.join)


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def crowd(
    folder: Path, *, count: int, tokens: int, seconds: float, kill_s: float, processes: int = 1
) -> Figures:
    """`count` clients for so long.

    tokens: attackers of each kind beside them.
    kill_s: seconds between two kills of an engine; infinite: none.
    processes: workers; 1: the gateway serves by itself.
    """
    script = ["--tokens-per-second", str(TOKENS_PER_S)]
    new_scripted_gateway = scripted_gateway(
        folder,
        script,
        FITSERVE_ADMIN_KEY=ADMIN,
        FITSERVE_BACKOFF_S="0.2",
        FITSERVE_BACKOFF_MAX_S="0.2",
        FITSERVE_WORKERS=str(processes),
    )
    new_scripted_gateway.client.headers["authorization"] = f"Bearer {ADMIN}"
    with contextlib.closing(new_scripted_gateway) as gateway:
        await asyncio.to_thread(gateway.start)
        assert gateway.process is not None
        pid = gateway.process.pid
        keys = [
            gateway.client.post("/admin/keys", json={"name": name}).json()["key"]
            for name in ("clients", "attackers")
        ]
        await asyncio.to_thread(_add, gateway)  # files that the first model opens stay open
        await asyncio.to_thread(_remove, gateway)
        before = descriptors(pid)
        await asyncio.to_thread(_add, gateway)
        sizes: list[float] = []
        worker_pids = workers(gateway) if processes > 1 else []
        worker_sizes: list[list[float]] = [[] for _ in worker_pids]
        chance, kills = random.Random(1), 0
        async with contextlib.AsyncExitStack() as stack:
            client_pid, resource = await stack.enter_async_context(
                process(clients, Target(gateway.port, keys[0], "m"), count)
            )
            pids = {
                "clients": client_pid,
                "gateway": pid,
                **{
                    f"worker {number}": process_pid
                    for number, process_pid in enumerate(worker_pids, 1)
                },
            }
            attacks: list[Any] = [Counter()]
            if tokens:
                pids["attackers"], attacks = await stack.enter_async_context(
                    process(attackers, Target(gateway.port, keys[1], "m"), tokens)
                )
            began, patience = time.monotonic(), Patience()
            starts = {name: ProcessorTime.read(process_pid) for name, process_pid in pids.items()}
            # An engine that starts anew takes longer on a busy machine.
            needs_kill = kill_s < math.inf
            while (now := time.monotonic() - began) < seconds or (
                needs_kill and not (kills or patience.is_over())
            ):
                await asyncio.sleep(min(SAMPLE_S, seconds / 10))
                sizes.append(resident_mib(pid))
                for worker_pid, worker_size in zip(worker_pids, worker_sizes, strict=True):
                    worker_size.append(resident_mib(worker_pid))
                if now >= (kills + 1) * kill_s:
                    kills += await asyncio.to_thread(_kill_one, gateway, chance)
            processor = {
                name: ProcessorTime.read(process_pid).minus(starts[name])
                for name, process_pid in pids.items()
            }
        # The process that multiprocessing keeps beside its children would stay: later tests look at
        # all children of theirs.
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
        await asyncio.to_thread(_remove, gateway)
        with contextlib.suppress(AssertionError):  # the figures say so
            await asyncio.to_thread(
                wait_for, "descriptors", lambda: descriptors(pid) <= before, HANG_S, 0.1
            )
        counts = (before, descriptors(pid))
        return Figures(resource[0], attacks[0], kills, sizes, counts, worker_sizes, processor)


def _add(gateway: Gateway) -> None:
    source = model_folder(gateway.data.parent / "model")
    wish = {
        "name": "m",
        "source": str(source),
        "engines": [ENGINE],
        "replicas": REPLICAS,
        "policy": {"max_attempts": 50},
    }
    answer = gateway.client.post("/admin/models", json=wish)
    assert answer.status_code == 202, answer.text
    gateway.until("m", "ready")
    wait_for("both engines", lambda: len(engines(gateway)) == REPLICAS)


def _remove(gateway: Gateway) -> None:
    gateway.client.delete("/admin/models/m")
    wait_for("no models", lambda: not gateway.client.get("/admin/models").json()["data"])


def _kill_one(gateway: Gateway, chance: random.Random) -> bool:
    """Whether there was one."""
    running = [pid for pids in engines(gateway).values() for pid in pids]
    if running:
        os.kill(chance.choice(running), signal.SIGKILL)
    return bool(running)
