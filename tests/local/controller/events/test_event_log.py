"""gateway.controller.events.event_log: told events are kept."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.controller.events.event_log import EventLog
from gateway.domain.facts import Event
from gateway.store.event_table import Bounds
from gateway.store.recovery import open_store
from tests.support.patience import HANG_S, hang_s
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


async def test_an_event_that_waits_for_a_thread_as_the_log_closes_is_kept(tmp_path: Path) -> None:
    store, free = open_store(tmp_path / "fitserve.db"), threading.Event()
    log = EventLog(store)
    await log.start()
    # All threads are busy, as on a machine that is.
    busy = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(busy)
    busy.submit(free.wait, HANG_S)
    log.append([Event(at=time.time(), kind="gateway.stopped", words="The gateway stops.")])
    async with asyncio.timeout(hang_s()):
        while not log._is_recording:
            await asyncio.sleep(0)
        closing = asyncio.create_task(log.close())
        await asyncio.sleep(0)
        assert not closing.done()
        free.set()
        await closing
    assert [event.kind for event in store.events.last(5, None)] == ["gateway.stopped"]
    store.close()


async def test_a_gateway_tells_events_on_its_event_loop_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell, threads = EventLog.append, set()

    def note_call(log: EventLog, events: Iterable[Event]) -> None:
        threads.add(threading.current_thread())
        tell(log, events)

    monkeypatch.setattr(EventLog, "append", note_call)
    async with running(tmp_path, lambda spec: EngineScript(model=spec.model)) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
    assert threads == {threading.current_thread()}


async def test_an_event_that_comes_during_a_reading_is_given_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "fitserve.db")
    store.events.add([Event(at=0.0, kind="gateway.started", words="It starts.")] * 2, 0.0)
    log = EventLog(store)
    await log.start()
    bounds = log.bounds

    async def bounds_before_an_event() -> Bounds:
        first_and_last = await bounds()
        store.events.add([Event(at=0.0, kind="gateway.stopped", words="It stops.")], 0.0)
        return first_and_last

    monkeypatch.setattr(log, "bounds", bounds_before_an_event)
    batch = await log.events_after(log.newest_number - 1)
    assert [event.kind for event in batch.events] == [
        "gateway.started",
        "gateway.stopped",
    ]
    assert batch.number == batch.events[-1].number
    await log.close()
    store.close()
