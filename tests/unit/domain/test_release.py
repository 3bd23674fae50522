"""The order of versions."""

from __future__ import annotations

from gateway.domain.release import release


def test_versions_stand_in_the_order_of_their_releases() -> None:
    versions = [
        "0.33.0",
        "0.5.10",
        "0.19.1",
        "0.5.10.post1",
        "nightly",
        "0.5.9",
        "0.5.23",
        "0.5.10rc1",
    ]
    assert sorted(versions, key=release) == [
        "nightly",
        "0.5.9",
        "0.5.10rc1",
        "0.5.10",
        "0.5.10.post1",
        "0.5.23",
        "0.19.1",
        "0.33.0",
    ]


def test_a_driver_is_compared_part_by_part() -> None:
    assert release("580.95.05") == release("580.95.5")
    assert release("570.124.06") < release("580.65.06")
