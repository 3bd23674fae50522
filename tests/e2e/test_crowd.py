"""A short run of `crowd`: its counts, and none of its figures."""

from pathlib import Path

import pytest

from tests.e2e.crowd import crowd
from tests.hostile.attackers import KINDS

pytestmark = pytest.mark.anyio


async def test_clients_that_leave_engines_that_die_and_attackers_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    figures = await crowd(tmp_path, count=40, tokens=2, seconds=5, kill_s=2)
    assert figures.kills
    assert figures.counts.ended["done"] > 0
    assert figures.counts.ended["left"] > 0
    assert figures.counts.ended["timeout"] == 0
    assert set(figures.attempts) == set(KINDS)
    before, after = figures.descriptors
    assert after <= before
