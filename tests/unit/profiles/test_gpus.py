"""profiles/gpus.yaml: every machine that we ship a snapshot of is described, each figure has a source, and a user can add."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from gateway.errors import SettingsError
from gateway.profiles import Profiles, shipped

TABLE = Profiles().gpus
SNAPSHOTS = sorted(path.stem for path in (shipped() / "hardware").glob("*.json"))
# Of these nothing was found that its maker published.
NO_BANDWIDTH = {"NVIDIA RTX PRO 6000 Blackwell Server Edition"}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_snapshot_is_described(name: str) -> None:
    for gpu in Profiles().hardware(name).gpus:
        assert TABLE.traits(gpu.capability) is not None
        assert (TABLE.bytes_per_second(gpu.name) is None) == (gpu.name in NO_BANDWIDTH), gpu.name


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("NVIDIA GeForce RTX 3090", 936),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA L4", 300),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", 864),
        ("Tesla T4", 320),
        ("Quadro RTX 4000", None),
        ("", None),
    ],
)
def test_a_bandwidth_is_of_that_very_gpu(name: str, gigabytes: int | None) -> None:
    found = TABLE.bytes_per_second(name)
    assert found == (None if gigabytes is None else gigabytes * 10**9)


def test_formats_only_grow_with_the_capability() -> None:
    formats = [set(TABLE.capabilities[name].formats) for name in sorted(TABLE.capabilities, key=float)]
    assert all(older <= newer for older, newer in itertools.pairwise(formats))
    assert "fp8" not in TABLE.capabilities["8.6"].formats
    assert "fp8" in TABLE.capabilities["8.9"].formats
    assert TABLE.capabilities["12.0"].shared_memory == 101376  # what reports of such machines print


def test_every_figure_has_a_source() -> None:
    assert set(TABLE.sources) == {"formats", "schemes", "shared_memory"}
    assert all(entry.source for entry in TABLE.bandwidths)


def test_what_nobody_wrote_down_is_not_guessed() -> None:
    assert TABLE.traits("11.0") is None
    assert TABLE.traits(None) is None


def test_a_users_file_goes_first(tmp_path: Path) -> None:
    (tmp_path / "gpus.yaml").write_text(
        "sources: {}\ncapabilities: {'11.0': {name: Blackwell, shared_memory: 232448}}\n"
        "bandwidths: [{pattern: 'RTX 3090', gb_per_s: 950, source: measured}]\n"
    )
    table = Profiles(tmp_path).gpus
    assert table.bytes_per_second("NVIDIA GeForce RTX 3090") == 950 * 10**9
    assert table.traits("11.0") is not None
    assert table.traits("8.6") is not None


def test_a_pattern_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpus.yaml").write_text("sources: {}\ncapabilities: {}\nbandwidths: [{pattern: '(', gb_per_s: 1, source: x}]\n")
    with pytest.raises(SettingsError, match="not a regular expression"):
        _ = Profiles(tmp_path).gpus
