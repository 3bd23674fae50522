"""The lease of a node: one gateway at a time, and an end after silence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import AgentRefusal
from gateway.hosts.cluster.lease import Lease


def test_the_first_gateway_takes_a_free_node_and_renews_its_lease() -> None:
    lease = Lease(10, "", 0)
    assert lease.claim("a", 1)
    assert not lease.claim("a", 9)
    assert not lease.has_ended(18.9)
    assert lease.has_ended(19)


def test_another_gateway_is_refused_until_the_engines_of_the_first_are_stopped() -> None:
    lease = Lease(10, "a", 0)
    with pytest.raises(AgentRefusal, match="Another gateway owns this machine, for 6 s more"):
        lease.claim("b", 4)
    for owner in ("a", "b"):
        with pytest.raises(AgentRefusal, match="engines are being stopped"):
            lease.claim(owner, 10)
    lease.release(12)
    assert lease.claim("b", 12)


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "end"]), st.floats(0, 30)), min_size=1, max_size=30
    )
)
def test_no_two_gateways_hold_a_node_within_one_length(steps: list[tuple[str, float]]) -> None:
    lease, now = Lease(10, "", 0), 0.0
    holder, hold_time = "", -10.0
    for step, wait_s in steps:
        now += wait_s
        if step == "end":
            if lease.has_ended(now):
                lease.release(now)
            continue
        try:
            lease.claim(step, now)
        except AgentRefusal:
            continue
        assert holder in ("", step) or now - hold_time >= 10
        holder, hold_time = step, now
