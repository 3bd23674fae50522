"""The priority of a request by its key and its header."""

from __future__ import annotations

import pytest

from gateway.domain.grant import Grant
from gateway.errors import BadRequest
from gateway.keys import PriorityClass
from gateway.proxy.access.auth import build_key
from gateway.proxy.access.priority import request_priority


@pytest.mark.parametrize(
    ("class_", "header", "priority"),
    [
        ("interactive", None, -100),
        ("normal", None, 0),
        ("batch", None, 100),
        (7, None, 7),
        ("interactive", b"batch", 100),
        ("interactive", b" Normal ", 0),
        ("normal", b"5", 5),
        # No header raises a request above its key.
        ("batch", b"interactive", 100),
        ("batch", b"-1000", 100),
        (7, b"normal", 7),
    ],
)
def test_a_header_lowers_the_class_of_a_key_alone(
    class_: PriorityClass | int, header: bytes | None, priority: int
) -> None:
    key = build_key(Grant(name="k", priority_class=class_), bytes(32))
    assert request_priority(header, key) == priority


@pytest.mark.parametrize(
    "header", [b"", b"soon", b"1001", b"-1001", b"1.5", b"0x1", b"\xff", b"9" * 99]
)
def test_another_header_is_refused(header: bytes) -> None:
    with pytest.raises(BadRequest, match="interactive, normal, batch") as refusal:
        request_priority(header, build_key(Grant(name="k"), bytes(32)))
    assert "x-fitserve-priority" in str(refusal.value)
