"""State that workers share: limits of keys, the capacity of replicas, and the messages that tell of
both."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from types import MappingProxyType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import NotFound, RateLimited
from gateway.keys import SCOPES
from gateway.proxy.access.auth import ANONYMOUS_KEY, Key, KeyLimits
from gateway.proxy.access.budgets import TokenCount
from gateway.proxy.access.failed_logins import MAX_FAILURES, FailedLogins
from gateway.proxy.access.rate_limits import RateLimiter
from gateway.proxy.limits import Limits
from gateway.proxy.routing.call import Call
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.shared_memory import SharedMemory, SharedTable
from gateway.proxy.workers import channel
from gateway.proxy.workers.channel import (
    Channel,
    KeyTableMessage,
    OtherLoads,
    ReplicaLoad,
    Report,
    ToWorker,
    WorkerSetup,
)
from gateway.proxy.workers.channel import RouteTableMessage as Models
from gateway.proxy.workers.shared_limits import LimitRows, SharedRateLimiter
from gateway.proxy.workers.shared_routes import SharedRoutes
from tests.support.patience import HANG_S

pytestmark = pytest.mark.anyio

DIGEST = b"d" * 32
ROUTE = ModelRoute(
    "m", "ready", "", 1, (RoutedReplica("http://127.0.0.1:1", "m-0-1", "m", 8),), "generate"
)


def key(limit: KeyLimits) -> Key:
    return Key("k", DIGEST, SCOPES, None, limit)


def begin(workers: int = 2, **changes: object) -> WorkerSetup:
    begin_message = WorkerSetup(
        workers,
        "/control.sock",
        Limits(),
        None,
        20.0,
        "info",
        False,
        None,
        Models((ROUTE,)),
        KeyTableMessage((key(KeyLimits(1, 2, 3)),), False, {DIGEST: 0}),
    )
    return msgspec.structs.replace(begin_message, **changes)


class Pair:
    """The limiters of two workers, each with its own view of the memory."""

    def __init__(self, limit: KeyLimits) -> None:
        self.key = key(limit)
        self.memory = SharedMemory()
        self.rows = LimitRows(self.memory)
        self.workers = [
            SharedRateLimiter(SharedMemory(self.memory.descriptor), index) for index in range(2)
        ]
        self.send_limits()

    def send_limits(self, *keys: Key) -> None:
        for worker in self.workers:
            worker.rows = self.rows.assign((self.key, *keys))

    def is_admitted(self, worker: int, now: float = 0.0) -> bool:
        try:
            return self.workers[worker].admit(self.key, "openai", now) is not None
        except RateLimited:
            return False


@given(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 30)), max_size=60))
def test_requests_of_all_workers_are_taken_from_one_minute(turns: list[tuple[int, float]]) -> None:
    pair, lone_limiter, now = Pair(KeyLimits(requests_per_minute=6)), RateLimiter(), 0.0
    for worker, step in turns:
        now += step
        try:
            is_admitted = lone_limiter.admit(pair.key, "openai", now) is not None
        except RateLimited:
            is_admitted = False
        assert pair.is_admitted(worker, now) == is_admitted
    os.close(pair.memory.descriptor)


def test_a_worker_new_to_a_key_knows_the_admissions_of_others() -> None:
    pair = Pair(KeyLimits(requests_per_minute=6))
    assert [pair.is_admitted(0) for _ in range(7)] == [True] * 6 + [False]
    assert not pair.is_admitted(1)
    assert [pair.is_admitted(1, 10.01), pair.is_admitted(0, 10.01)] == [True, False]


def test_tokens_are_taken_everywhere_when_an_answer_ends() -> None:
    pair = Pair(KeyLimits(tokens_per_minute=100))
    permit = pair.workers[0].admit(pair.key, "openai", 0.0)
    assert permit is not None
    permit.finish(TokenCount(100, 30), 0.0)
    with pytest.raises(RateLimited, match="100 tokens"):
        pair.workers[1].admit(pair.key, "openai", 18.0)
    assert pair.is_admitted(1, 19.0)


def test_concurrent_requests_are_counted_over_all_living_workers() -> None:
    pair = Pair(KeyLimits(in_flight=3))
    permits = [worker.admit(pair.key, "openai", 0.0) for worker in pair.workers]
    assert [pair.is_admitted(1), pair.is_admitted(0)] == [True, False]
    pair.rows.forget(1)
    assert [pair.is_admitted(0) for _ in range(3)] == [True, True, False]
    assert permits[0] is not None
    permits[0].finish(TokenCount(), 0.0)
    assert [pair.is_admitted(1), pair.is_admitted(0)] == [True, False]


def test_the_row_of_a_key_that_is_gone_is_the_last_to_be_given_again_and_empty_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.proxy.workers.shared_limits.ROWS", 2)
    pair = Pair(KeyLimits(requests_per_minute=1))
    assert pair.is_admitted(0)
    another, third = (dataclasses.replace(pair.key, digest=letter * 32) for letter in (b"e", b"f"))
    assert pair.rows.assign([another]) == {another.digest: 1}
    # None is left for a third one: it has its limits at each worker.
    assert pair.rows.assign([another, third, pair.key]) == {another.digest: 1, third.digest: 0}
    pair.send_limits()
    pair.key = third
    pair.send_limits()
    assert [pair.is_admitted(0), pair.is_admitted(1)] == [True, False]


def test_a_token_has_the_row_of_its_key_at_every_worker() -> None:
    pair = Pair(KeyLimits(requests_per_minute=1))
    token = dataclasses.replace(pair.key, digest=b"t" * 32, principal=pair.key.digest)
    assert pair.rows.assign([pair.key, token]) == {pair.key.digest: 0}
    assert pair.is_admitted(0)
    pair.key = token
    assert not pair.is_admitted(1)


def test_a_table_forgets_the_oldest_alone() -> None:
    table = SharedTable(64)
    for number in range(2000):
        table.store(b"%d" % number, number + 1, number)
    kept_numbers = [
        number for number in range(2000) if table.get(b"%d" % number) == (number + 1, number)
    ]
    assert len(kept_numbers) <= 64 * 8
    assert kept_numbers[-64:] == [*range(2000 - 64, 2000)]
    table.store(b"1999", 7, 2000)
    assert table.get(b"1999") == (7, 2000)
    assert table.get(b"2000") == (0, 0)


def test_wrong_keys_are_counted_over_all_workers() -> None:
    memory = SharedMemory()
    workers = [FailedLogins(lambda: 1000.5, SharedMemory(memory.descriptor)) for _ in range(3)]
    for number in range(MAX_FAILURES):
        workers[number % 3].count_wrong_key("10.0.0.1")
    workers[0].count_wrong_key("10.0.0.2")
    for worker in workers:
        with pytest.raises(RateLimited):
            worker.count_wrong_key("10.0.0.1")
        with pytest.raises(RateLimited):
            worker.accept_guessable_key("10.0.0.1", DIGEST)
    workers[1].accept_guessable_key("10.0.0.2", DIGEST)


def test_each_worker_has_its_share_of_a_replica_and_room_left_by_others() -> None:
    routes = SharedRoutes(begin(), SharedMemory())
    replica = ROUTE.replicas[0]

    def count_requests() -> int:
        while routes.pick(ROUTE, Call("chat", "m")) is not None:
            routes.start_request(replica)
        return routes.in_flight(replica.id)

    assert count_requests() == 4  # nothing was heard of the others yet
    routes.set_other_loads({replica.id: 2})
    assert count_requests() == 6
    routes.set_other_loads({})
    assert count_requests() == 8
    for _ in range(8):
        routes.finish_request(replica)
    routes.set_other_loads({replica.id: 8})
    assert count_requests() == 4


def test_a_batch_leaves_places_free_that_other_workers_keep_for_chats() -> None:
    routes = SharedRoutes(begin(), SharedMemory())
    replica = ROUTE.replicas[0]

    def count_batch() -> int:
        while routes.pick(ROUTE, Call("chat", "m", priority=100)) is not None:
            routes.start_request(replica, priority=100)
        return routes.in_flight(replica.id)

    routes.set_other_loads({}, {replica.id: 2})
    assert count_batch() == 3
    routes.set_other_loads({})
    assert count_batch() == 5
    assert routes.pick(ROUTE, Call("chat", "m")) is replica


def test_a_worker_reports_its_places_for_chats() -> None:
    routes = SharedRoutes(begin(), SharedMemory())
    replica = ROUTE.replicas[0]
    routes.pick(ROUTE, Call("chat", "m", priority=100))
    for _ in range(4):
        routes.start_request(replica)
    assert routes.kept_places() == {}
    for _ in range(3):
        routes.finish_request(replica)
    assert routes.kept_places() == {replica.id: 3}


def test_the_places_of_a_queue_are_divided_among_the_workers() -> None:
    for queue, workers, share in ((None, 2, 64), (None, 3, 43), (10, 4, 3), (1, 2, 1), (0, 2, 0)):
        routes = SharedRoutes(begin(workers, queue_per_model=queue), SharedMemory())
        assert routes._places(ROUTE) == share


def test_a_response_made_elsewhere_is_found_by_its_key_at_once() -> None:
    memory = SharedMemory()
    first_routes, second_routes = (
        SharedRoutes(begin(), SharedMemory(memory.descriptor)) for _ in range(2)
    )
    first_routes.responses.record(b"resp_1", key(KeyLimits()), ROUTE.replicas[0].seed)
    maker = second_routes.responses.maker_of("resp_1", key(KeyLimits()))
    assert second_routes.model_of("resp_1", maker) == "m"
    assert second_routes.pick(ROUTE, Call("responses", "m", maker=maker)) == ROUTE.replicas[0]
    with pytest.raises(NotFound):
        second_routes.responses.maker_of("resp_1", ANONYMOUS_KEY)


async def test_messages_arrive_as_they_were_sent() -> None:
    near, far = [await Channel.open(end) for end in socket.socketpair()]
    down: list[ToWorker] = [
        begin(),
        Models((ROUTE,)),
        KeyTableMessage((), True, {}),
        OtherLoads({"m-0-1": 3}),
    ]
    up = Report({"m-0-1": ReplicaLoad(2, 0.5)}, (("fitserve_connections", (), 1.0),))
    for message in down:
        near.send(message)
    far.send(up)
    assert [await far.read_command() for _ in down] == down
    assert await near.read_report() == up
    near.close()
    with pytest.raises((EOFError, OSError)):
        await asyncio.wait_for(far.read_command(), HANG_S)
    far.close()


async def test_a_malformed_message_is_an_error() -> None:
    parent_end, child_end = socket.socketpair()
    far = await Channel.open(child_end)
    data = msgspec.msgpack.encode({"type": "OtherLoads", "in_flight": {"m-0-1": "three"}})
    parent_end.sendall(len(data).to_bytes(4, "big") + data)
    with pytest.raises(msgspec.ValidationError):
        await far.read_command()
    far.close()
    parent_end.close()


def test_the_first_message_is_read_without_an_event_loop() -> None:
    parent_end, child_end = socket.socketpair()
    parent_end.sendall(channel.frame(begin()))
    parent_end.close()
    assert channel.receive_begin(child_end) == begin()
    with pytest.raises(EOFError):
        channel.receive_begin(child_end)
    child_end.close()


def test_a_table_with_surrogates_can_be_sent() -> None:
    odd = ModelRoute(
        "m",
        "failed",
        "it said \udcff",
        1,
        (*ROUTE.replicas, RoutedReplica("http://x", "m#1", "\ud800")),
        None,
    )
    table = channel.build_route_message(RouteTable(MappingProxyType({"m": odd})))
    assert msgspec.msgpack.decode(channel.frame(table)[4:], type=Models) == table
    assert [replica.id for replica in table.models[0].replicas] == ["m-0-1"]
