"""The priority in the body of a request for an engine."""

from __future__ import annotations

import json

import pytest

from gateway.engines.registry import engine_kind
from gateway.proxy.bodies.engine_priority import has_no_priority, set_priority


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
    ("body", "is_free"),
    [
        (b'{"model":"m"}', True),
        (b'{"model":"priority first"}', True),
        (b'{"model":"m","priority":-5}', False),
        (b'{"model":"m","\\u0070riority":-5}', False),
    ],
)
def test_a_body_without_the_field_is_known_without_a_parser(body: bytes, *, is_free: bool) -> None:
    assert has_no_priority(body) is is_free
    assert is_free or "priority" in json.loads(body)


@pytest.mark.parametrize(
    ("kind", "argv", "is_filled"),
    [
        ("vllm", ("--scheduling-policy=priority",), True),
        ("sglang", ("--enable-priority-scheduling",), False),
        ("sglang", ("--enable-priority-scheduling", "--default-priority-value=0"), True),
    ],
)
def test_a_request_without_a_priority_is_normal_where_the_engine_says_so(
    kind: str, argv: tuple[str, ...], *, is_filled: bool
) -> None:
    assert engine_kind(kind).has_default_priority(argv) is is_filled


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
