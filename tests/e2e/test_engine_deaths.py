from pathlib import Path

import pytest

from tests.e2e.engine_deaths import deaths

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]


async def test_every_client_of_a_dead_engine_is_told(tmp_path: Path) -> None:
    for figures in await deaths(tmp_path, rounds=3):
        # The figures are printed by `python -m tests.e2e.engine_deaths`; here only a hang would be an error.
        assert figures["told"] < 10
        assert figures["refused"] < 10
