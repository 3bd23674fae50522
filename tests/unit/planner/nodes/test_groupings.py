"""Groups of nodes by the networks between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gateway.planner.nodes.groupings import (
    Group,
    Quality,
    best_groupings,
    fast_groupings,
)

RATES = st.sampled_from([0.0, 1e8, 1.2e9, 1.25e9, 12.5e9, 25e9])


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, dict[frozenset[int], Quality]]:
    """A number of nodes, and the quality between each two."""
    count = draw(st.integers(2, 6))
    pairs = [frozenset(pair) for pair in combinations(range(count), 2)]
    return count, {pair: (draw(RATES), 0.0) for pair in pairs}


def reader(qualities: Mapping[frozenset[int], Quality]) -> Callable[[int, int], Quality]:
    return lambda a, b: qualities[frozenset((a, b))]


def slowest(groups: list[Group], qualities: Mapping[frozenset[int], Quality]) -> Quality:
    return min(qualities[frozenset(pair)] for group in groups for pair in combinations(group, 2))


@given(networks(), st.integers(2, 4))
def test_groups_are_disjoint_and_of_the_size(
    case: tuple[int, dict[frozenset[int], Quality]], size: int
) -> None:
    count, qualities = case
    for search in (best_groupings, fast_groupings):
        for groups in search(count, size, reader(qualities)):
            members = [node for group in groups for node in group]
            assert len(members) == len(set(members)) == size * len(groups)
            assert set(members) <= set(range(count))


@given(networks(), st.integers(2, 4), st.data())
def test_a_faster_network_slows_no_grouping(
    case: tuple[int, dict[frozenset[int], Quality]], size: int, data: st.DataObject
) -> None:
    count, qualities = case
    pair = data.draw(st.sampled_from(sorted(qualities, key=sorted)))
    faster = {**qualities, pair: (data.draw(RATES) + qualities[pair][0], 0.0)}

    def best(rates: Mapping[frozenset[int], Quality], groups: int) -> Quality:
        """The slowest network of the best grouping with at least this many groups."""
        groupings = best_groupings(count, size, reader(rates))
        return max(
            (slowest(grouping, rates) for grouping in groupings if len(grouping) >= groups),
            default=(-1.0, 0.0),
        )

    for groups in range(1, count // size + 1):
        assert best(faster, groups) >= best(qualities, groups)


def test_equal_networks_give_groups_in_order() -> None:
    groupings = list(best_groupings(4, 2, lambda _a, _b: (1e9, 0.0)))
    assert groupings == [[(0, 1)], [(0, 1), (2, 3)]]


def test_the_fastest_pairs_come_together() -> None:
    qualities = {frozenset(pair): (1e9, 0.0) for pair in combinations(range(4), 2)}
    qualities[frozenset((0, 2))] = qualities[frozenset((1, 3))] = (25e9, 0.0)
    groupings = list(best_groupings(4, 2, reader(qualities)))
    assert groupings == [[(0, 2)], [(0, 2), (1, 3)]]


def test_nearly_equal_networks_are_one_level() -> None:
    """Measurements of equal networks differ a little, and large groups need all of them."""
    rates = iter(range(100))
    qualities = {
        frozenset(pair): (1.25e9 - 1e6 * next(rates), 0.0) for pair in combinations(range(9), 2)
    }
    assert [len(group) for group in next(fast_groupings(9, 8, reader(qualities)))] == [8]
