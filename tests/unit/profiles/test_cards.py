"""profiles/cards.yaml: every machine that we ship a snapshot of has its cards there, each figure is
plausible, and a user can add."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from gateway.engines.common.kernels.cards import Card
from gateway.errors import SettingsError
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from tests.support.fake_nvml import MIB

TABLE = Profiles().card_table
SNAPSHOTS = sorted(path.stem for path in (shipped_profiles() / "hardware").glob("*.json"))
NAMES = [f"{card.name}, {card.memory_mib} MiB" for card in TABLE.cards]
MINE = (
    "{name: mine, capability: '8.6', memory_mib: 1, memory_gb_s: 1, sms: 1, fp16_tflops: 1,"
    " nvlinks: 0, sources: [me]}"
)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_card_of_every_snapshot_is_described(name: str) -> None:
    hardware = Profiles().hardware(name)
    for gpu in hardware.gpus:
        card = TABLE.card(gpu.name, gpu.total_bytes)
        assert card is not None
        assert card.capability == gpu.capability
        assert card.has_unified_memory == (gpu.memory_kind == "unified")
        if card.memory_mib:
            assert card.memory_mib * MIB == gpu.total_bytes
        if card.pcie_generation and gpu.pcie.max_generation:
            assert card.pcie_generation == gpu.pcie.max_generation
        links = {
            link.nvlinks
            for link in hardware.links
            if gpu.index in (link.a, link.b) and link.nvlinks
        }
        assert links <= {card.nvlinks}


def test_each_card_is_listed_once() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_every_source_is_used() -> None:
    assert {source for card in TABLE.cards for source in card.sources} == set(TABLE.sources)


@pytest.mark.parametrize("card", TABLE.cards, ids=NAMES)
def test_peaks_are_those_of_the_generation(card: Card) -> None:
    """The formats of the tensor cores follow from the capability, and narrower formats are not
    slower."""
    traits = Profiles().gpus.traits(card.capability)
    assert traits is not None
    peaks_of_card = {"bf16": card.bf16_tflops, "fp8": card.fp8_tflops, "fp4": card.fp4_tflops}
    assert {name for name, peak in peaks_of_card.items() if peak} == set(traits.formats) & set(
        peaks_of_card
    )
    assert card.bf16_tflops in (None, card.fp16_tflops)
    peaks = [peak for peak in (card.fp16_tflops, card.fp8_tflops, card.fp4_tflops) if peak]
    assert all(narrow >= 1.9 * wide for wide, narrow in itertools.pairwise(peaks))


@pytest.mark.parametrize("card", TABLE.cards, ids=NAMES)
def test_figures_are_in_their_units(card: Card) -> None:
    """Of all generations an SM multiplies 512 to 8192 numbers a clock, at 1 to 3 GHz, and reads 4
    to 62 bytes in a nanosecond: the H20-3e has few SMs and the memory of an H200."""
    assert 512 <= card.fp16_tflops * 1e3 / card.sms <= 3 * 8192
    assert 4 <= card.memory_gb_s / card.sms <= 62
    if card.nvlinks and card.nvlink_gb_s:
        assert card.nvlink_gb_s / card.nvlinks in (14.0625, 25, 50)


def test_cards_of_one_name_are_distinguished_by_their_memory() -> None:
    assert TABLE.card("NVIDIA GeForce RTX 3060", 12288 * MIB) is not None
    small_card = TABLE.card("NVIDIA GeForce RTX 3060", 8192 * MIB)
    assert small_card is not None
    assert small_card.memory_gb_s == 240
    assert TABLE.card("NVIDIA GeForce RTX 3060", 10240 * MIB) is None
    # ECC off: more memory, the same card.
    assert TABLE.card("NVIDIA A40", 49140 * MIB) is not None
    assert TABLE.card("NVIDIA A40", None) is not None
    assert TABLE.card("NVIDIA GeForce RTX 9090", None) is None


def test_a_users_file_goes_first(tmp_path: Path) -> None:
    (tmp_path / "cards.yaml").write_text(
        f"sources: {{me: I}}\ncards: [{MINE}, {MINE.replace('mine', 'NVIDIA L4')}]\n"
    )
    table = Profiles(tmp_path).card_table
    card_of_user = table.card("mine", MIB)
    assert card_of_user is not None
    assert card_of_user.memory_gb_s == 1
    assert table.card("NVIDIA L4", MIB) != TABLE.card("NVIDIA L4", None)
    assert table.card("NVIDIA L40", None) == TABLE.card("NVIDIA L40", None)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (MINE.replace("[me]", "[you]"), "sources that are not described: you"),
        (MINE.replace("nvlinks: 0", "nvlinks: 4"), "nvlinks and nvlink_gb_s"),
        (MINE.replace("memory_mib: 1", "unified: false"), "memory of its own"),
        (MINE.replace("sms: 1", "sms: 1, tflops: 3"), "there is no such field"),
    ],
)
def test_a_wrong_row_is_refused(tmp_path: Path, wrong: str, problem: str) -> None:
    (tmp_path / "cards.yaml").write_text(f"sources: {{me: I}}\ncards: [{wrong}]\n")
    with pytest.raises(SettingsError, match=problem):
        _ = Profiles(tmp_path).card_table
