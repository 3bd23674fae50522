"""Power cuts, a few; `python -m tests.e2e.power_cut` makes many."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.power_cut import cuts, record

pytestmark = [
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace records what is written")
]


def test_acknowledged_changes_outlive_a_power_cut(tmp_path: Path) -> None:
    calls = record(tmp_path, 60)
    figures = cuts(tmp_path / "cuts", calls, 40)
    assert (figures["changes"], figures["cuts"]) == (60, 40)
    # A store that syncs nothing is found out.
    with pytest.raises(AssertionError):
        cuts(tmp_path / "unsynced", [call for call in calls if call.name != "sync"], 40)
