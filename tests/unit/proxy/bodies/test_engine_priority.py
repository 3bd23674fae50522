"""The priority in the body of a request for an engine."""

from __future__ import annotations

import json

import pytest

from gateway.engines.registry import engine_kind
from gateway.keys import PriorityOrder
from gateway.proxy.bodies.engine_priority import set_priority


@pytest.mark.parametrize(
    ("own_priority", "priority", "is_smallest_first", "sent"),
    [
        (None, 100, True, 100),
        (None, 100, False, -100),
        (None, 0, True, 0),
        # A client may lower its own request further.
        (300, 100, True, 300),
        (-300, 100, False, -300),
        (-300, 100, True, 100),
        (300, 100, False, -100),
        ("first", 100, True, 100),
        (1.5, 0, True, 0),
    ],
)
def test_no_body_raises_its_priority(
    own_priority: float | str | None, priority: int, is_smallest_first: bool, sent: int
) -> None:
    fields = {"model": "m", "prompt": "é"} | (
        {} if own_priority is None else {"priority": own_priority}
    )
    body = set_priority(json.dumps(fields).encode(), priority, is_smallest_first=is_smallest_first)
    assert json.loads(body) == fields | {"priority": sent}


@pytest.mark.parametrize(
    ("kind", "argv", "order"),
    [
        ("vllm", (), ""),
        ("vllm", ("--scheduling-policy=fcfs",), ""),
        ("vllm", ("--scheduling-policy=priority",), "smallest"),
        ("vllm-cpu", ("--scheduling-policy=priority",), "smallest"),
        ("sglang", ("--schedule-policy=fcfs",), ""),
        ("sglang", ("--enable-priority-scheduling",), "largest"),
        (
            "sglang",
            ("--enable-priority-scheduling", "--schedule-low-priority-values-first"),
            "smallest",
        ),
    ],
)
def test_an_engine_has_an_order_by_its_flags(
    kind: str, argv: tuple[str, ...], order: PriorityOrder
) -> None:
    assert engine_kind(kind).first_priority(argv) == order
