"""One gateway for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.dataplane import Gateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    """Each test sets its own routes and must leave nothing behind."""
    with Gateway() as running:
        yield running
