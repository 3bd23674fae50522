"""The cost of events for the gateway's event loop.

    python -m benchmarks.events [--models 200] [--seconds 10] [--starts 1]

First a check of models without news, then a storm: twenty passes a second, in each of which one
model (or --starts models) fails, gets the next plan, starts and is ready. All events go to the disk
and to two listeners. The figures are CPU time of the loop's thread. "without events" is the same
passes without listeners.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.controller.decisions.reconcile import NoAction
from gateway.controller.events.event_log import EventLog
from gateway.controller.events.observer import Observer
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.domain import Attempt, Failure
from gateway.machine.gpu_watch import GpuWatch
from gateway.server.admin.event_routes import stream
from gateway.settings import Settings
from gateway.store.store import Store
from tests.support.makers import plan, wish

PASSES = 20
PLANS = (plan(), plan(max_context=2048))


def step(replica: ReplicaState, numbers: Iterator[int]) -> None:
    """The state that a pass finds: a failed engine, and the next one ready."""
    now, old = time.time(), replica.attempt
    if old is not None:
        failure = Failure(
            kind="oom",
            phase="loading",
            message="it needs 3 GiB more",
            line="torch.OutOfMemoryError: ...",
            advice="Wait.",
        )
        replica.history.append(old.evolve(state="failed", ended_at=now, failure=failure))
        del replica.history[:-4]
    number = next(numbers)
    made = PLANS[number % 2]
    replica.attempt = Attempt(
        id=number, model=replica.model, replica=0, state="ready", plan=made,
        fingerprint=made.fingerprint, port=1,
        started_at=now - 60, ready_at=now,
    )  # fmt: skip
    replica.status = NoAction("ready")


async def listen(events: EventLog, heard: list[int]) -> None:
    async for text in stream(events, [], events.newest_number, None):
        heard[0] += text.count(b"\ndata: ")


async def storm(seconds: float, step_all: Callable[[], None], look: Callable[[], None]) -> float:
    """Milliseconds of the loop's time per second; what the benchmark itself does for a pass is not
    counted."""
    began, until, making = time.thread_time(), time.monotonic() + seconds, 0.0
    while time.monotonic() < until:
        making -= time.thread_time()
        step_all()
        making += time.thread_time()
        look()
        await asyncio.sleep(1 / PASSES)
    return 1000 * (time.thread_time() - began - making) / seconds


async def measure(count: int, seconds: float, starts: int, folder: Path) -> None:
    store = Store(folder / "fitserve.db")
    events = EventLog(store)
    await events.start()
    models: dict[str, ManagedModel] = {}
    numbers = iter(range(1, 10**9))
    for number in range(count):
        made = ManagedModel(wish(name=f"m{number}"), time.time())
        made.replicas = [ReplicaState(made.wish.name, 0)]
        step(made.replicas[0], numbers)
        models[made.wish.name] = made
    no_keys: Any = lambda: ()  # noqa: E731
    observer = Observer(
        events, models, GpuWatch(SimpleNamespace()), no_keys, Settings(data_dir=folder)
    )
    turn = cycle(models.values())

    def step_all() -> None:
        for _ in range(starts):
            step(next(turn).replicas[0], numbers)

    without_ms = await storm(seconds, step_all, lambda: None)
    observer.load_position(store)
    observer.report_changes()
    began = time.thread_time()
    for _ in range(100):
        observer._observe_in_turn()  # noqa: SLF001 - what `look` puts off
    quiet_ms = (time.thread_time() - began) * 10
    await asyncio.sleep(1)
    heard = [0]
    listeners = [asyncio.create_task(listen(events, heard)) for _ in range(2)]
    await asyncio.sleep(0.5)
    storm_ms = await storm(seconds, step_all, observer.report_changes)
    await asyncio.sleep(1)
    told = heard[0] / len(listeners) / seconds
    print(f"{count} models, nothing new: {quiet_ms:.2f} ms a look")
    print(
        f"storm: {told:.0f} events/s, {storm_ms:.1f} ms of the loop's time per second,"
        f" {without_ms:.1f} without events"
    )
    for task in listeners:
        task.cancel()
    await events.close()
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--starts", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args.models, args.seconds, args.starts, Path(folder)))


if __name__ == "__main__":
    main()
