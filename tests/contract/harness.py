"""The parts that a host brings to the contract suite: itself, a world that outlives it, and hands
that act from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from gateway.domain import Instance, LaunchSpec
from gateway.errors import AgentAway
from gateway.hosts.host import Host
from tests.support.patience import HANG_S, Patience, hang_s


class Harness(Protocol):
    """Everything runs `tests/support/fake_engine.py`, or its twin in memory; `script` is its
    command line without port and model."""

    log_stays: bool
    """Whether `follow` still gives the log after `stop`: false where the log is a part of the
    instance."""

    @property
    def host(self) -> Host:
        """The host under test; `restart` puts a new one here."""
        ...

    def make_spec(
        self, name: str, fingerprint: str = "f1", script: Sequence[str] = (), port: int = 0
    ) -> LaunchSpec:
        """A spec whose engine can be prepared and started; port 0: any that is free."""
        ...

    def restart(self) -> Host:
        """A new host on the same world, as after the gateway was killed; the old one is not asked
        again."""
        ...

    def foreign(self, name: str) -> Callable[[], bool]:
        """Let somebody else hold `name`. The answer says whether that is still there, untouched."""
        ...

    def kill_engine(self, name: str) -> None:
        """SIGKILL the engine's main process from outside."""
        ...

    def members(self, name: str) -> int:
        """How many processes the engine's family has now; 0 when it is gone."""
        ...

    async def cleanup(self) -> None:
        """End everything that was started, and the work of `foreign`."""
        ...


async def until(state: str, condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until `condition` holds; fails the test, naming `state`, when that seems to be never. A
    host that does not answer, as on a busy machine, is asked again."""
    patience, absence = Patience(), ""
    while True:
        try:
            if await condition():
                return
        except AgentAway as error:
            absence = f"; {error}"
        if patience.is_over():
            raise AssertionError(f"not within {HANG_S:g} s: {state}{absence}")
        await asyncio.sleep(patience.pause_s(0.05))


async def find(host: Host, name: str) -> Instance | None:
    """The instance as `list` shows it."""
    return next((instance for instance in await host.list() if instance.name == name), None)


async def wait_for_exit(host: Host, name: str) -> Instance:
    """Wait until `list` shows the instance as exited."""
    instances: list[Instance] = []

    async def is_exited() -> bool:
        instance = await find(host, name)
        if instance is not None and instance.state == "exited":
            instances.append(instance)
        return bool(instances)

    await until(f"{name} is listed as exited", is_exited)
    return instances[0]


async def get(instance: Instance, path: str) -> tuple[int, bytes]:
    """One plain GET to the engine; status 0 when nobody answers."""
    return await request(
        instance, f"GET {path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n\r\n".encode()
    )


async def request(instance: Instance, raw: bytes) -> tuple[int, bytes]:
    assert instance.url is not None
    address, _, port = instance.url.removeprefix("http://").rpartition(":")
    try:
        async with asyncio.timeout(hang_s()):
            reader, writer = await asyncio.open_connection(address, int(port))
            try:
                writer.write(raw)
                answer = await reader.read()
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return 0, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


async def answering(instance: Instance) -> None:
    """Wait until the engine's health endpoint says 200."""

    async def healthy() -> bool:
        return (await get(instance, "/health"))[0] == 200

    await until(f"{instance.name} answers at {instance.url}", healthy)
