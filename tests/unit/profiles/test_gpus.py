"""profiles/gpus.yaml: every machine that we ship a snapshot of is described, its formats have a
source, and a user can add."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from gateway.engines.common.kernels.gpus import GpuTraits
from gateway.errors import SettingsError
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles

TABLE = Profiles().gpus
SNAPSHOTS = sorted(path.stem for path in (shipped_profiles() / "hardware").glob("*.json"))


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_snapshot_is_described(name: str) -> None:
    for gpu in Profiles().hardware(name).gpus:
        assert TABLE.traits(gpu.capability) is not None


def test_formats_only_grow_with_the_capability() -> None:
    formats = [
        set(TABLE.capabilities[name].formats) for name in sorted(TABLE.capabilities, key=float)
    ]
    assert all(older <= newer for older, newer in itertools.pairwise(formats))
    assert "fp8" not in TABLE.capabilities["8.6"].formats
    assert "fp8" in TABLE.capabilities["8.9"].formats


def test_formats_and_schemes_have_a_source() -> None:
    assert set(TABLE.sources) == {"formats", "schemes"}


def test_unrecorded_traits_are_not_guessed() -> None:
    assert TABLE.traits("11.0") is None
    assert TABLE.traits(None) is None


def test_a_users_file_goes_first(tmp_path: Path) -> None:
    (tmp_path / "gpus.yaml").write_text(
        "sources: {}\ncapabilities: {'11.0': {name: Blackwell}, '8.6': {name: mine, formats: [bf16,"
        " fp8]}}\n"
    )
    table = Profiles(tmp_path).gpus
    assert table.traits("11.0") is not None
    assert table.traits("8.6") == GpuTraits(name="mine", formats=("bf16", "fp8"))
    assert table.traits("8.9") == TABLE.traits("8.9")


def test_a_capability_without_quotes_is_refused_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "gpus.yaml").write_text("sources: {}\ncapabilities:\n  11.0: {name: Blackwell}\n")
    with pytest.raises(
        SettingsError, match=r'the key 11.0 is a number. Write it in quotes: "11.0"'
    ):
        _ = Profiles(tmp_path).gpus
