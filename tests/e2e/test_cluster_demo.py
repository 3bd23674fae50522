"""`scripts/cluster-demo`: real engines on two machines, of which one fails and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cluster_demo import run
from tests.support.cluster_nodes import obstacle

pytestmark = pytest.mark.engine


@pytest.fixture
def engines_for_cluster(request: pytest.FixtureRequest) -> Path:
    """Skips the test where namespaces or Ray are missing."""
    if reason := obstacle():
        pytest.skip(reason)
    path: Path = request.getfixturevalue("engines")
    return path


def test_a_machine_fails_and_comes_back(
    engines_for_cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(engines_for_cluster, tmp_path) == 0, capsys.readouterr().out
    assert "9 passed, 0 failed" in capsys.readouterr().out
