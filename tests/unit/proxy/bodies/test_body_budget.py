"""Memory for bodies: whatever is asked in whatever order, it is bounded, no key takes all of it,
and somebody always gets on."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Busy, FitserveError, TooSlow
from gateway.proxy.bodies.body_budget import PATIENCE_S, PRESSED_BYTES_S, BodyBudget

MIB = 2**20
READ = MIB // 4


class Body:
    """A body of `size` bytes, of which `present_bytes` came in."""

    def __init__(self, budget: BodyBudget, account: str = "a", size: int = 16 * MIB) -> None:
        self.budget = budget
        self.account = account
        self.size = size
        self.present_bytes = self.moved_bytes = 0
        self.reads = True
        self.refusal: FitserveError | None = None

    def continue_body(self) -> None:
        self.reads = True

    def reject(self, error: FitserveError) -> None:
        self.refusal = error
        self.budget.release(self)

    def read(self, count: int = READ) -> None:
        self.present_bytes = self.moved_bytes = min(self.present_bytes + count, self.size)
        if self.present_bytes == self.size:
            self.budget.add(self, self.present_bytes)
            return
        try:
            self.reads = self.budget.grow(self, self.present_bytes)
        except Busy as error:
            self.refusal = error

    @property
    def whole(self) -> bool:
        return self.present_bytes == self.size


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(0, 15),
            st.integers(1, 16 * MIB),
            st.sampled_from(["read", "leave"]),
        ),
        max_size=300,
    )
)
def test_the_budget_is_bounded_and_counts_the_bytes_that_are_here(
    steps: list[tuple[str, int, int, str]],
) -> None:
    budget = BodyBudget(16 * MIB, 120)
    bodies: dict[tuple[str, int], Body] = {}
    for account, number, size, step in steps:
        body = bodies.setdefault((account, number), Body(budget, account, size))
        if step == "leave":
            budget.release(body)
            del bodies[account, number]
        elif body.reads and not body.whole and body.refusal is None:
            body.read()
        bodies = {key: body for key, body in bodies.items() if body.refusal is None}
        bytes_by_account: defaultdict[str, int] = defaultdict(int)
        for (name, _), body_of_account in bodies.items():
            bytes_by_account[name] += body_of_account.present_bytes
        assert budget.used_bytes == sum(bytes_by_account.values()) <= 2 * budget.size + READ
        for name in "abc":
            bodies_of_account = [
                body_of_account
                for (account_name, _), body_of_account in bodies.items()
                if account_name == name
            ]
            if bodies_of_account and not any(
                body_of_account.whole for body_of_account in bodies_of_account
            ):
                assert any(body_of_account.reads for body_of_account in bodies_of_account)
    for body in bodies.values():
        budget.release(body)
    assert budget.used_bytes == 0
    assert not budget._by_account
    assert not budget._waiting_count
    assert not budget._growing
    assert not budget._owners_beyond_limit


def test_one_key_takes_half_and_the_next_reads_on() -> None:
    budget = BodyBudget(16 * MIB, 120)
    bodies = [Body(budget) for _ in range(60)]
    while any(body.reads and body.refusal is None and not body.whole for body in bodies[1:]):
        for body in bodies[1:]:
            if body.reads:
                body.read()
    assert (
        budget.used_bytes - max(body.present_bytes for body in bodies)
        <= budget.size / 2 + 60 * READ
    )
    other_body = Body(budget, "b", 2 * MIB)
    for _ in range(8):
        assert other_body.reads
        other_body.read()
    assert other_body.whole


def contended_budget(count: int = 20) -> tuple[BodyBudget, list[Body], Body]:
    """`count` bodies that have 1 MiB each, and one that waits."""
    budget = BodyBudget(16 * MIB, 120)
    hogs = [Body(budget) for _ in range(count)]
    for hog in hogs:
        hog.read(MIB)
    victim = Body(budget, size=2 * MIB)
    victim.read(MIB)
    assert not victim.reads
    return budget, hogs, victim


def look(budget: BodyBudget, begin: float, seconds: float) -> None:
    for half in range(int(2 * seconds) + 1):
        budget.sweep(begin + half / 2)


def test_a_trickling_client_loses_the_room_when_somebody_waits() -> None:
    budget, hogs, victim = contended_budget()
    look(budget, 0, PATIENCE_S - 1)
    assert not victim.reads
    look(budget, PATIENCE_S - 1, PATIENCE_S)
    assert budget._waiting_count == 0
    assert {type(hog.refusal) for hog in hogs} == {TooSlow, type(None)}


def test_a_client_that_brings_enough_keeps_the_room_and_the_waiting_one_is_told_at_last() -> None:
    budget, hogs, victim = contended_budget()
    for second in range(119):
        for hog in hogs:
            hog.moved_bytes += PRESSED_BYTES_S
        look(budget, second, 0.5)
    assert all(hog.refusal is None for hog in hogs if hog.reads)
    assert victim.refusal is None
    for second in range(119, 125):
        for hog in hogs:
            hog.moved_bytes += PRESSED_BYTES_S
        look(budget, second, 0.5)
    assert isinstance(victim.refusal, Busy)


def test_slow_bodies_have_their_full_time_while_no_body_waits() -> None:
    budget = BodyBudget(16 * MIB, 120)
    body = Body(budget)
    body.read(MIB)
    look(budget, 0, 60)
    assert body.refusal is None


def test_only_bodies_on_their_way_to_an_engine_are_hurried() -> None:
    budget, hogs, victim = contended_budget()
    queued_body, stuck_body = hogs[:2]
    budget.add(queued_body, MIB)
    budget.add(stuck_body, MIB, is_pressed=True)
    look(budget, 0, 2 * PATIENCE_S + 1)
    assert queued_body.refusal is None
    assert stuck_body.refusal is not None
    assert victim.reads


@pytest.mark.parametrize("size", [1024, 16 * MIB, 64 * MIB])
def test_the_budget_has_room_for_two_of_the_largest_bodies(size: int) -> None:
    assert BodyBudget(size, 120).size >= 2 * size
