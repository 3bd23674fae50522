"""The patience of tests on a busy machine."""

from __future__ import annotations

import pytest

from tests.support.patience import slowness_of


@pytest.mark.parametrize(
    ("load", "factor"),
    [
        ("0.10 0.20 0.30 1/200 77", 1.0),
        ("8.00 4.00 2.00 1/200 77", 4.0),
        # Programs that have just begun are in no mean.
        ("0.10 0.20 0.30 12/200 77", 6.0),
    ],
)
def test_waits_are_longer_by_the_programs_that_want_a_core(load: str, factor: float) -> None:
    assert slowness_of(load, 2) == factor
