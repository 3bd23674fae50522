"""The logs of two parts of an engine, one of which ends while the other waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Container
from typing import cast

import pytest

from gateway.domain import EngineProcess
from gateway.errors import AgentAway, HostError
from gateway.hosts import part_logs
from gateway.hosts.host import Host
from gateway.hosts.part_logs import QUIET_LOOKS, PartLogs

pytestmark = pytest.mark.anyio


class TwoParts:
    """The log of `first` ends. That of `second` has a line for each look of `words`."""

    def __init__(self, words: Container[int] = (), fault: HostError | None = None) -> None:
        self.looks = 0
        self._words = words
        self._fault = fault
        self._line_event = asyncio.Event()

    async def follow(self, name: str) -> AsyncGenerator[bytes, None]:
        yield b"a line"
        if name == "first":
            return
        while True:
            await self._line_event.wait()
            self._line_event.clear()
            yield b"look %d" % self.looks

    async def processes(self, name: str) -> tuple[EngineProcess, ...]:
        assert name == "second"
        self.looks += 1
        if self.looks in self._words:
            self._line_event.set()
        if self._fault is not None:
            raise self._fault
        return ()


async def lines_of(host: TwoParts) -> list[bytes]:
    logs = PartLogs(cast("Host", host), {"first": b"", "second": b"(two) "})
    return [line async for line in logs.lines()]


async def test_last_words_are_awaited_for_looks_and_not_for_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part_logs, "LOOK_PAUSE_S", 0.0)
    late_words = (QUIET_LOOKS - 2, 2 * QUIET_LOOKS - 5)
    host = TwoParts(late_words)
    lines = await lines_of(host)
    assert sorted(lines[:2]) == [b"(two) a line", b"a line"]
    assert lines[2:] == [b"(two) look %d" % look for look in late_words]
    assert host.looks >= late_words[-1] + QUIET_LOOKS - 1


async def test_a_machine_that_is_lost_has_no_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_logs, "LOOK_PAUSE_S", 0.0)
    host = TwoParts(fault=AgentAway("The machine does not answer.", hint=""))
    assert len(await lines_of(host)) == 2
    assert host.looks >= QUIET_LOOKS


async def test_a_part_that_prints_for_ever_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_logs, "LOOK_PAUSE_S", 0.0)
    monkeypatch.setattr(part_logs, "SETTLE_LIMIT_S", 0.05)
    host = TwoParts(range(1, 10**9))
    assert len(await lines_of(host)) >= 2


async def test_an_error_of_a_log_ends_all() -> None:
    class Broken(TwoParts):
        async def follow(self, name: str) -> AsyncGenerator[bytes, None]:
            if name == "second":
                raise HostError("The disk is gone.", hint="")
            async for line in super().follow(name):
                yield line

    with pytest.raises(HostError, match="The disk is gone"):
        await lines_of(Broken())
