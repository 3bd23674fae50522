"""The requests in flight: their phases, and the oldest of all processes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.proxy.access.auth import ANONYMOUS_KEY
from gateway.proxy.api.endpoints import ENDPOINTS
from gateway.proxy.routing.call import Call
from gateway.proxy.routing.in_flight import MAX_SHOWN_REQUESTS, WaitingClass, merge, oldest
from gateway.proxy.routing.model_route import RoutedReplica
from gateway.proxy.routing.route_table import RouteTable
from tests.support.dataplane import model

REPLICA = RoutedReplica("http://127.0.0.1:9", "m-0", "m")
TABLE = RouteTable({"m": model(REPLICA.url), "cold": model(name="cold")})
AHEAD = 1_700_000_000.0


def ask(**fields: Any) -> Any:
    request_fields = {
        "id": "r",
        "model": "m",
        "endpoint": ENDPOINTS[0],
        "key": ANONYMOUS_KEY,
        "address": "10.0.0.9",
        "state": "asked",
        "call": Call("chat", "m"),
    }
    request_fields |= {
        "replica": REPLICA,
        "started_at": 990.0,
        "first_byte_at": 0.0,
        "received_bytes": 12,
        "sent_bytes": 0,
    }
    return SimpleNamespace(**request_fields | fields)


@pytest.mark.parametrize(
    ("fields", "phase"),
    [
        ({"state": "queued", "replica": None, "model": "cold"}, "waiting for the model"),
        ({"state": "queued", "replica": None, "model": "removed"}, "waiting for the model"),
        ({"state": "queued", "replica": None}, "waiting for a place"),
        ({"state": "connecting"}, "waiting for the first token"),
        ({"state": "asked"}, "waiting for the first token"),
        ({"state": "answering"}, "waiting for the first token"),
        ({"state": "answering", "first_byte_at": 990.25, "sent_bytes": 7}, "answering"),
    ],
)
def test_the_phase_of_a_request_names_its_wait(fields: dict[str, Any], phase: str) -> None:
    [row] = oldest([ask(**fields)], TABLE, AHEAD).data
    assert row.phase == phase
    assert row.first_byte_s == (0.25 if phase == "answering" else None)
    assert row.began_at == AHEAD + 990


def test_an_unrouted_or_finished_request_is_not_in_flight() -> None:
    asks = [ask(state="reading"), ask(state="done"), ask(model="")]
    assert oldest(asks, TABLE, AHEAD) == merge([])


def test_the_oldest_are_shown_and_the_others_counted_of_one_process_and_of_several() -> None:
    asks = [ask(id=str(number), started_at=100.0 + number) for number in range(130)]
    random.Random(5).shuffle(asks)
    lone_rows = oldest(asks, TABLE, AHEAD)
    assert [row.id for row in lone_rows.data] == [
        str(number) for number in range(MAX_SHOWN_REQUESTS)
    ]
    assert lone_rows.more == 130 - MAX_SHOWN_REQUESTS
    merged_view = merge(oldest(asks[part::3], TABLE, AHEAD) for part in range(3))
    assert ([row.id for row in merged_view.data], merged_view.more) == (
        [row.id for row in lone_rows.data],
        lone_rows.more,
    )


def test_waiting_requests_are_counted_by_model_and_class() -> None:
    def waiting_request(priority: int, started_at: float, model_name: str = "m") -> Any:
        call = Call("chat", model_name, priority=priority)
        return ask(state="queued", model=model_name, call=call, started_at=started_at)

    batches = [waiting_request(100, 900.0 + number) for number in range(MAX_SHOWN_REQUESTS + 9)]
    first = oldest([*batches, waiting_request(0, 980.0), ask()], TABLE, AHEAD)
    second = oldest([waiting_request(100, 890.0), waiting_request(7, 985.0, "cold")], TABLE, AHEAD)
    assert merge([first, second]).waiting == (
        WaitingClass("cold", 7, "7", 1, AHEAD + 985),
        WaitingClass("m", 0, "normal", 1, AHEAD + 980),
        WaitingClass("m", 100, "batch", MAX_SHOWN_REQUESTS + 10, AHEAD + 890),
    )
    assert merge([oldest([ask()], TABLE, AHEAD)]).waiting == ()
