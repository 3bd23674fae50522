"""Machines of a cluster as users see them."""

from __future__ import annotations

from gateway.hosts.cluster.machine_views import machine_views


def test_machines_that_do_not_answer_are_named_with_their_problem() -> None:
    states = {"two": "10.0.0.1 and 10.0.0.2 have one name", "one": "alive"}
    first_view, two = machine_views(states, ())
    assert (first_view.name, first_view.state, first_view.address) == ("one", "no node service", "")
    assert (two.name, two.state) == ("two", states["two"])
