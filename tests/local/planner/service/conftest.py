"""The real planning process, instead of a fork."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def planning() -> None:
    """Here the planning process is tested."""
