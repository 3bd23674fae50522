"""Processes that a test started by asyncio, and whose end its event loop did not live to see.

A thread of asyncio waits for such a process and holds its transport, whose warning would come in a
later test.
"""

from __future__ import annotations

from asyncio.base_subprocess import BaseSubprocessTransport
from typing import Any
from weakref import WeakSet

_started: WeakSet[Any] = WeakSet()


def watch() -> None:
    """Note each process that asyncio starts from here on."""
    construct = BaseSubprocessTransport.__init__

    def note_processes(transport: Any, *arguments: Any, **options: Any) -> None:
        construct(transport, *arguments, **options)
        _started.add(transport)

    BaseSubprocessTransport.__init__ = note_processes  # type: ignore[assignment, method-assign]


def remaining() -> list[str]:
    """The processes of event loops that have ended, each in one answer only."""
    leftovers = [
        transport
        for transport in _started
        if transport.get_returncode() is None and transport._loop.is_closed()
    ]
    _started.difference_update(leftovers)
    return [repr(transport) for transport in leftovers]
