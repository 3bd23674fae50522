"""The patience of a start with the code of its engine."""

from __future__ import annotations

import pytest

from gateway.planner.service.engine_check import LIMIT_S, REQUESTED_LIMIT_S, check_limit_s


@pytest.mark.parametrize(
    ("load", "cores", "limit_s"),
    [
        (0.0, 2, LIMIT_S),
        (2.0, 2, LIMIT_S),
        (6.0, 2, 3 * LIMIT_S),
        (10.0, 2, REQUESTED_LIMIT_S),
        (42.0, 2, LIMIT_S),
        (1.0, 0, LIMIT_S),
    ],
)
def test_a_busy_machine_gets_more_time_unless_it_is_hopeless(
    load: float, cores: int, limit_s: float
) -> None:
    assert check_limit_s(load, cores) == limit_s
