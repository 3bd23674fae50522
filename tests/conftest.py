"""Shared by all tests. The folder says the tier: unit, conformance, local, contract, e2e."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent

# How long an example takes says nothing on a busy machine.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(item.path.relative_to(HERE).parts[0])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
