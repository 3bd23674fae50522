from pathlib import Path

import pytest

from tests.e2e.engine_deaths import deaths

pytestmark = pytest.mark.anyio


async def test_every_client_of_a_dead_engine_gets_an_error(tmp_path: Path) -> None:
    """How soon, `python -m tests.e2e.engine_deaths` prints."""
    assert len(await deaths(tmp_path, rounds=3)) == 3
