"""Additions of the in-memory twin to the contract: faults on request, and a world that outlives the
host."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.domain import EngineRef, LaunchSpec
from gateway.errors import HostError
from gateway.hosts.host import Host
from tests.contract.process_harness import free_port
from tests.support.memory_host import MemoryHost, World
from tests.support.patience import HANG_S
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(anyio_backend: str) -> AsyncIterator[World]:
    new_world = World()
    yield new_world
    await new_world.close()


def make_spec(world: World, **changes: object) -> LaunchSpec:
    engine = EngineRef(kind="fake", version="1")
    spec = LaunchSpec(
        name="a1",
        model="llama",
        attempt=1,
        fingerprint="f1",
        engine=engine,
        argv=(),
        env={},
        gpus=(),
        shm_bytes=0,
        port=free_port(),
    )
    return spec.evolve(**changes)


async def test_an_engine_without_a_script_serves_the_model_of_its_spec(world: World) -> None:
    host: Host = MemoryHost(world=world)
    instance = await host.start(make_spec(world))
    async with httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(retries=5), trust_env=False, timeout=HANG_S
    ) as client:
        models = (await client.get(f"{instance.url}/v1/models")).json()
    assert models["data"][0]["id"] == "llama"


async def test_a_fault_strikes_the_next_call_and_no_other(world: World) -> None:
    host = MemoryHost(world=world)
    world.fail_next("list", HostError("The host does not answer."))
    world.fail_next("list", HostError("It still does not."))
    with pytest.raises(HostError, match="does not answer"):
        await host.list()
    with pytest.raises(HostError, match="still"):
        await host.list()
    assert await host.list() == []


@pytest.mark.parametrize("method", ["prepare", "start", "stop", "follow", "allocate_port"])
async def test_every_method_can_be_made_to_fail(world: World, method: str) -> None:
    host = MemoryHost(world=world)
    world.fail_next(method, HostError("on request"))  # type: ignore[arg-type]
    with pytest.raises(HostError, match="on request"):
        match method:
            case "prepare":
                await host.prepare(EngineRef(kind="fake", version="1"), lambda report: None)
            case "start":
                await host.start(make_spec(world))
            case "stop":
                await host.stop("a1", grace_s=0)
            case "follow":
                await anext(host.follow("a1"))
            case _:
                await host.allocate_port()
    assert await host.list() == []


async def test_an_engine_whose_port_is_taken_says_so_and_exits(world: World) -> None:
    host = MemoryHost(world=world)
    first_spec = make_spec(world)
    await host.start(first_spec)
    await host.start(first_spec.evolve(name="a2"))
    lines = [line async for line in host.follow("a2")]
    assert b"address already in use" in lines[-1]
    assert [(instance.name, instance.exit_code) for instance in await host.list()] == [
        ("a1", None),
        ("a2", 1),
    ]


async def test_lines_come_at_their_times(world: World) -> None:
    script = EngineScript(lines=((0, "at once"), (0.1, "later")), serve=False, exit_code=7)
    host = MemoryHost(lambda spec: script, world)
    await host.start(make_spec(world))
    assert [line async for line in host.follow("a1")] == [b"at once", b"later"]
    assert (await host.list())[0].exit_code == 7
