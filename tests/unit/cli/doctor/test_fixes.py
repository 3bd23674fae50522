"""`fitserve doctor --fix` mends folders, and nothing else."""

from __future__ import annotations

from pathlib import Path

from gateway.cli.doctor.checks import MachineCheck
from gateway.cli.doctor.fixes import apply_fixes

BEFORE = [
    MachineCheck("data folder", "warn", "open", "close it"),
    MachineCheck("port", "ok", "free"),
]


def repaired_check() -> MachineCheck:
    return MachineCheck("data folder", "ok", "closed")


def test_folders_are_made_and_closed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    first, other_check = apply_fixes(BEFORE, data, data / "models", repaired_check)
    assert (first.state, first.fix) == ("ok", f"created, created {data}/models")
    assert other_check == BEFORE[1]
    data.chmod(0o755)
    assert apply_fixes(BEFORE, data, data / "models", repaired_check)[0].fix == "closed to others"
    assert data.stat().st_mode & 0o777 == 0o700
    assert apply_fixes(BEFORE, data, data / "models", repaired_check) == BEFORE, (
        "nothing was left to do"
    )


def test_a_fix_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, _ = apply_fixes(
        BEFORE, tmp_path / "file/data", tmp_path / "file/data/models", repaired_check
    )
    assert "could not be fixed" in first.fix
