"""Places for lines of batches: by model, by key, in all, in bytes, and in turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

import pytest

from gateway.keys import PRIORITIES, SCOPES
from gateway.proxy.access.auth import ANONYMOUS_KEY, Key, KeyLimits
from gateway.proxy.routing.class_places import capacity_for
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.server.batches.line_places import (
    MAX_BYTES,
    LinePlace,
    LinePlaces,
    lines_at_once,
    lines_of_key,
)

pytestmark = pytest.mark.anyio


def place(model: str = "m", size: int = 1, owner: str = "a") -> LinePlace:
    return LinePlace(owner, model, size)


def places_for(
    lines: int, models: Mapping[str, int] | None = None, owners: Mapping[str, int] | None = None
) -> LinePlaces:
    return LinePlaces(
        lines,
        lambda name: (models or {}).get(name, 100),
        lambda name: (owners or {}).get(name, 100),
    )


async def waits(places: LinePlaces, new_place: LinePlace) -> bool:
    """Whether a line has to wait for that place."""
    task = asyncio.create_task(places.wait(new_place))
    await asyncio.sleep(0)
    is_waiting = not task.done()
    task.cancel()
    await asyncio.wait({task})
    return is_waiting


async def test_a_model_and_a_key_have_their_own_places() -> None:
    places = places_for(10, {"x": 2}, {"b": 1})
    for _ in range(2):
        places.acquire(place("x"))
    places.acquire(place("y", owner="b"))
    assert await waits(places, place("x"))
    assert await waits(places, place("y", owner="b"))
    assert not await waits(places, place("y"))
    places.release(place("x"))
    assert not await waits(places, place("x"))


async def test_all_models_share_the_lines() -> None:
    places = places_for(3)
    for model in "xyz":
        places.acquire(place(model))
    assert await waits(places, place("other"))
    assert places.count == 3


async def test_bytes_are_bounded_but_for_one_large_line() -> None:
    places = places_for(100)
    assert not await waits(places, place(size=3 * MAX_BYTES))
    places.acquire(place(size=MAX_BYTES - 10))
    assert await waits(places, place(size=11))
    assert not await waits(places, place(size=10))


async def test_batches_that_wait_have_places_in_turn() -> None:
    places = places_for(1)
    order = []

    async def feed(name: str) -> None:
        for _ in range(3):
            new_place = place(owner=name)
            await places.wait(new_place)
            places.acquire(new_place)
            order.append(name)
            asyncio.get_running_loop().call_soon(places.release, new_place)

    places.acquire(place())
    tasks = [asyncio.create_task(feed(name)) for name in "xy"]
    await asyncio.sleep(0)
    places.release(place())
    await asyncio.gather(*tasks)
    assert order == ["x", "y"] * 3
    assert places.count == 0


def test_a_key_with_a_limit_keeps_a_place_for_other_requests() -> None:
    keys = [
        Key("app", b"d" * 32, SCOPES, limit=KeyLimits(in_flight=count)) for count in (1, 2, 9, None)
    ]
    assert [lines_of_key(key) for key in keys] == [1, 1, 8, math.inf]
    assert lines_of_key(ANONYMOUS_KEY) == math.inf


def route(*capacities: int | None) -> ModelRoute:
    replicas = tuple(
        RoutedReplica("http://127.0.0.1:9001", f"r{number}", "m", capacity)
        for number, capacity in enumerate(capacities)
    )
    return ModelRoute("m", "ready", "", 0, replicas, "generate")


def test_lines_at_once_are_those_of_the_class_and_some_that_wait() -> None:
    assert lines_at_once(None) == lines_at_once(route()) == 2
    assert lines_at_once(route(40)) == capacity_for(PRIORITIES["batch"], 40) + 8
    assert lines_at_once(route(40, None)) == lines_at_once(route(40)) + 32
