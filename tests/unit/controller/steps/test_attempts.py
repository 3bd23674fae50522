"""gateway.controller.steps.attempts: the port of a start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.controller.fleet.managed_model import ReplicaState
from gateway.controller.steps.attempts import Attempts
from gateway.domain import Attempt
from gateway.errors import HostError
from tests.support.makers import attempt, plan

pytestmark = pytest.mark.anyio


async def begin(ports: Iterator[int], used_ports: Callable[[], range]) -> Attempt:
    """The start of a plan on a host that answers with these ports."""

    async def allocate_port() -> int:
        return next(ports)

    def add_attempt(_model: str, _index: int, _plan: Any, port: int, *_: object) -> Attempt:
        started: Attempt = attempt(port=port)
        return started

    launcher: Any = SimpleNamespace(
        host=SimpleNamespace(allocate_port=allocate_port),
        settings=SimpleNamespace(start_timeout_s=60.0, data=None),
    )
    unused: Any = None
    store: Any = SimpleNamespace(add_attempt=add_attempt)
    attempts = Attempts(store, unused, launcher, unused, lambda: unused, used_ports, unused)
    return await attempts.start(ReplicaState("m", 0), plan())


async def test_a_start_takes_a_port_of_no_other_start() -> None:
    assert (await begin(itertools.count(8000), lambda: range(8000, 8007))).port == 8007


async def test_no_start_takes_a_port_of_another_one() -> None:
    with pytest.raises(HostError) as error:
        await begin(itertools.count(8000), lambda: range(8000, 9000))
    assert error.value.message == "No free port was found in 100 tries."
    assert error.value.hint == "Stop other programs on this machine."


async def test_containers_share_the_number_of_their_port() -> None:
    assert (await begin(itertools.repeat(8000), lambda: range(8000, 8001))).port == 8000
