"""The folder of the shipped profiles, where it or a file of it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import SettingsError
from gateway.profiles import profile_tables
from gateway.profiles.profiles import Profiles


def test_a_missing_folder_of_profiles_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        profile_tables, "__file__", str(tmp_path / "gateway/profiles/profile_tables.py")
    )
    with pytest.raises(SettingsError, match="The profiles of fitserve are missing") as refusal:
        profile_tables.shipped_profiles.__wrapped__()
    assert "Install fitserve again" in (refusal.value.hint or "")


@pytest.mark.parametrize("name", ["speed_knowledge", "xids"])
def test_a_missing_file_of_the_profiles_is_reported(tmp_path: Path, name: str) -> None:
    profiles = Profiles(roots=(tmp_path,))
    with pytest.raises(SettingsError, match=f"yaml is missing: {tmp_path}"):
        getattr(profiles, name)
