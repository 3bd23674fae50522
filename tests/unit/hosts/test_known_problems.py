"""A problem is new until it is known."""

from __future__ import annotations

from gateway.hosts.known_problems import KnownProblems


def test_a_problem_is_new_once_until_it_changes_or_was_away() -> None:
    problems = KnownProblems()
    assert problems.record("a", "silent")
    assert not problems.record("a", "silent")
    assert problems.record("b", "silent")
    assert problems.record("a", "refused")
    assert problems.record("a", "silent")
    problems.forget("a")
    problems.forget("a")
    assert problems.record("a", "silent")
    assert not problems.record("b", "silent")
