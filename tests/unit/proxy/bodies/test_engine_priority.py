"""The priority in the body of a request for an engine."""

from __future__ import annotations

import json

import pytest

from gateway.engines.registry import engine_kind
from gateway.proxy.bodies.engine_priority import set_priority


@pytest.mark.parametrize(
    ("own_priority", "priority", "factor", "sent"),
    [
        (None, 100, 1, 100),
        (None, 100, -1, -100),
        (None, 0, 1, 0),
        # A client may lower its own request further.
        (300, 100, 1, 300),
        (-300, 100, -1, -300),
        (-300, 100, 1, 100),
        (300, 100, -1, -100),
        ("first", 100, 1, 100),
        (1.5, 0, 1, 0),
    ],
)
def test_no_body_raises_its_priority(
    own_priority: float | str | None, priority: int, factor: int, sent: int
) -> None:
    fields = {"model": "m", "prompt": "é"} | (
        {} if own_priority is None else {"priority": own_priority}
    )
    body = set_priority(json.dumps(fields).encode(), priority, factor)
    assert json.loads(body) == fields | {"priority": sent}


@pytest.mark.parametrize(
    ("kind", "argv", "factor"),
    [
        ("vllm", (), 0),
        ("vllm", ("--scheduling-policy=fcfs",), 0),
        ("vllm", ("--scheduling-policy=priority",), 1),
        ("vllm-cpu", ("--scheduling-policy=priority",), 1),
        ("sglang", ("--schedule-policy=fcfs",), 0),
        ("sglang", ("--enable-priority-scheduling",), -1),
        (
            "sglang",
            ("--enable-priority-scheduling", "--schedule-low-priority-values-first"),
            1,
        ),
    ],
)
def test_an_engine_has_an_order_by_its_flags(kind: str, argv: tuple[str, ...], factor: int) -> None:
    assert engine_kind(kind).priority_factor(argv) == factor
