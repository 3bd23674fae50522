"""Disjoint groups of nodes with the best networks. Pure.

best_groupings(count, size, quality)   for a few nodes: exactly, one for each number of groups
fast_groupings(count, size, quality)   for many nodes: those of the fastest networks

A faster network between two nodes never makes a result of `best_groupings` slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

Quality = tuple[float, float]
"""More is better: bytes/s, then the negative latency."""
Group = tuple[int, ...]
"""Positions of nodes."""

# The fastest different networks that are planned for.
_LEVELS = 3
# Networks of at least this part of the fastest count as equal to it.
_EQUAL_SHARE = 0.7


def best_groupings(
    count: int, size: int, quality: Callable[[int, int], Quality]
) -> Iterator[list[Group]]:
    """The groups with the fastest slowest network, for each number of groups.

    count: the number of nodes. Among equal groups, earlier nodes are taken.
    """
    qualities = {
        group: min(quality(a, b) for a, b in combinations(group, 2))
        for group in combinations(range(count), size)
    }
    levels = sorted(set(qualities.values()), reverse=True)
    for number in range(1, count // size + 1):
        for level in levels:
            able = [group for group, slowest in qualities.items() if slowest >= level]
            groups = _disjoint(able, number)
            if groups is not None:
                yield groups
                break


def _disjoint(candidates: Sequence[Group], number: int) -> list[Group] | None:
    """The first disjoint groups of this number; None: there are none."""
    if number == 0:
        return []
    for position, group in enumerate(candidates):
        members = set(group)
        later_groups = [
            candidate for candidate in candidates[position + 1 :] if members.isdisjoint(candidate)
        ]
        groups = _disjoint(later_groups, number - 1)
        if groups is not None:
            return [group, *groups]
    return None


def fast_groupings(
    count: int, size: int, quality: Callable[[int, int], Quality]
) -> Iterator[list[Group]]:
    """The groups for each of the fastest different networks, as many as come together easily.

    count: the number of nodes.
    """
    for level in _levels(count, quality):
        free_nodes = list(range(count))
        groups = list[Group]()
        while group := _first_group(free_nodes, size, level, quality):
            groups.append(group)
            free_nodes = [node for node in free_nodes if node not in group]
        if groups:
            yield groups


def _levels(count: int, quality: Callable[[int, int], Quality]) -> list[Quality]:
    """The slowest network of each level, the fastest level first."""
    levels: list[Quality] = []
    fastest = 0.0
    for network in sorted({quality(a, b) for a, b in combinations(range(count), 2)}, reverse=True):
        if levels and network[0] and network[0] >= _EQUAL_SHARE * fastest:
            levels[-1] = network
            continue
        levels.append(network)
        fastest = network[0]
    return levels[:_LEVELS]


def _first_group(
    nodes: Sequence[int], size: int, level: Quality, quality: Callable[[int, int], Quality]
) -> Group | None:
    for first in nodes:
        group = [first]
        for node in nodes:
            if node != first and all(quality(node, member) >= level for member in group):
                group.append(node)
            if len(group) == size:
                return tuple(group)
    return None
