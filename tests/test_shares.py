"""What workers share: limits of keys, the capacity of replicas, and the messages that tell of both."""

from __future__ import annotations

import asyncio
import socket
from types import MappingProxyType

import msgspec
import pytest

from gateway.errors import RateLimited
from gateway.keys import SCOPES
from gateway.serve import channel
from gateway.serve.auth import Key, Limit
from gateway.serve.channel import (
    Begin,
    Channel,
    Elsewhere,
    KeyTable,
    Load,
    Made,
    Report,
    Spent,
    Table,
    ToControl,
    ToWorker,
    Usage,
)
from gateway.serve.guard import Limits
from gateway.serve.routes import Call, ModelRoute, Replica, RouteTable
from gateway.serve.shares import SharedLimiter
from gateway.serve.worker import SharedRoutes

pytestmark = [pytest.mark.unit, pytest.mark.anyio]

DIGEST = b"d" * 32
ROUTE = ModelRoute("m", "ready", "", 1, (Replica("http://127.0.0.1:1", "m-0-1", "m", 8),), "generate")


def key(limit: Limit) -> Key:
    return Key("k", DIGEST, SCOPES, None, limit)


def begin(workers: int = 2, **changes: object) -> Begin:
    made = Begin(
        workers, "/control.sock", Limits(), None, 20.0, "info", False, Table((ROUTE,)), KeyTable((key(Limit(1, 2, 3)),), False)
    )
    return msgspec.structs.replace(made, **changes)


class Pair:
    """Two workers that tell each other what was used."""

    def __init__(self, limit: Limit) -> None:
        self.key = key(limit)
        self.told = 0
        self.workers = [SharedLimiter(self._tell), SharedLimiter(self._tell)]

    def _tell(self) -> None:
        self.told += 1

    def exchange(self, now: float) -> None:
        spent = [one.spent() for one in self.workers]
        for index, one in enumerate(self.workers):
            one.spent_elsewhere(Spent(1 - index, spent[1 - index]), {DIGEST: self.key}, now)


def test_requests_of_all_workers_are_taken_from_one_minute() -> None:
    pair = Pair(Limit(requests_per_minute=6))
    for turn in range(6):
        permit = pair.workers[turn % 2].admit(pair.key, "openai", 0.0)
        assert permit is not None
        permit.end(0, 0.0)
        pair.exchange(0.0)
    assert pair.told
    for one in pair.workers:
        with pytest.raises(RateLimited):
            one.admit(pair.key, "openai", 0.0)
    # One comes back in ten seconds, for whoever asks first.
    assert pair.workers[0].admit(pair.key, "openai", 10.01)
    pair.exchange(10.01)
    with pytest.raises(RateLimited):
        pair.workers[1].admit(pair.key, "openai", 10.02)


def test_what_was_admitted_before_the_other_was_heard_is_owed() -> None:
    pair = Pair(Limit(requests_per_minute=6))
    for one in pair.workers:
        for _ in range(6):
            assert one.admit(pair.key, "openai", 0.0)
    pair.exchange(0.0)
    for one in pair.workers:
        with pytest.raises(RateLimited):
            one.admit(pair.key, "openai", 60.0)
        assert one.admit(pair.key, "openai", 70.1)


def test_tokens_are_taken_everywhere_when_an_answer_ends() -> None:
    pair = Pair(Limit(tokens_per_minute=100))
    permit = pair.workers[0].admit(pair.key, "openai", 0.0)
    assert permit is not None
    permit.end(100, 0.0)
    pair.exchange(0.0)
    with pytest.raises(RateLimited, match="100 tokens"):
        pair.workers[1].admit(pair.key, "openai", 0.1)


def test_requests_at_once_are_counted_over_all_workers_and_those_of_a_dead_one_are_not() -> None:
    pair = Pair(Limit(in_flight=2))
    assert all(one.admit(pair.key, "openai", 0.0) for one in pair.workers)
    pair.exchange(0.0)
    with pytest.raises(RateLimited, match="may have, 2"):
        pair.workers[0].admit(pair.key, "openai", 0.0)
    pair.workers[0].spent_elsewhere(Spent(1, {DIGEST: Usage(0, 0, 0)}), {DIGEST: pair.key}, 0.0)
    assert pair.workers[0].admit(pair.key, "openai", 0.0)


def test_each_worker_has_its_share_of_a_replica_and_beyond_it_what_the_others_leave() -> None:
    routes = SharedRoutes(begin())
    replica = ROUTE.replicas[0]

    def taken() -> int:
        while routes.pick(ROUTE, Call("chat", "m")) is not None:
            routes.begin(replica)
        return routes.in_flight(replica.id)

    assert taken() == 4  # nothing was heard of the others yet
    routes.elsewhere({replica.id: 2})
    assert taken() == 6
    routes.elsewhere({})
    assert taken() == 8
    for _ in range(8):
        routes.end(replica)
    routes.elsewhere({replica.id: 8})
    assert taken() == 4


def test_a_response_made_elsewhere_is_found() -> None:
    routes = SharedRoutes(begin())
    routes.made_elsewhere(Made("resp_1", "m", "m-0-1"))
    assert routes.model_of("resp_1") == "m"
    assert routes.pick(ROUTE, Call("responses", "m", previous="resp_1")) == ROUTE.replicas[0]


async def test_messages_arrive_as_they_were_sent() -> None:
    near, far = [await Channel.of(end) for end in socket.socketpair()]
    down: list[ToWorker] = [begin(), Table((ROUTE,)), KeyTable((), True), Elsewhere({"m-0-1": 3}), Made("resp_1", "m", "m-0-1")]
    up: list[ToControl] = [
        Report({"m-0-1": Load(2, 0.5)}, (("fitserve_connections", (), 1.0),)),
        Spent(1, {DIGEST: Usage(1, 2, 3)}),
    ]
    for message in down:
        near.send(message)
    for report in up:
        far.send(report)
    assert [await far.to_worker() for _ in down] == down
    assert [await near.to_control() for _ in up] == up
    near.close()
    with pytest.raises((EOFError, OSError)):
        await asyncio.wait_for(far.to_worker(), 5)
    far.close()


async def test_what_is_no_message_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    far = await Channel.of(theirs)
    data = msgspec.msgpack.encode({"type": "Elsewhere", "in_flight": {"m-0-1": "three"}})
    ours.sendall(len(data).to_bytes(4, "big") + data)
    with pytest.raises(msgspec.ValidationError):
        await far.to_worker()
    far.close()
    ours.close()


def test_the_first_message_is_read_without_an_event_loop() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(channel.frame(begin()))
    ours.close()
    assert channel.receive_begin(theirs) == begin()
    with pytest.raises(EOFError):
        channel.receive_begin(theirs)
    theirs.close()


def test_a_table_with_what_is_no_text_can_be_sent() -> None:
    odd = ModelRoute("m", "failed", "it said \udcff", 1, (*ROUTE.replicas, Replica("http://x", "m#1", "\ud800")), None)
    table = channel.table_of(RouteTable(MappingProxyType({"m": odd})))
    assert msgspec.msgpack.decode(channel.frame(table)[4:], type=Table) == table
    assert [replica.id for replica in table.models[0].replicas] == ["m-0-1"]
