"""Machines composed of cards, without a snapshot of their own."""

from __future__ import annotations

import pytest

from gateway.domain import Hardware
from gateway.profiles.profiles import Profiles

PROFILES = Profiles()
CARDS = [card.name for card in PROFILES.card_table.cards if not card.has_unified_memory]


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("card", CARDS)
def test_every_card_makes_a_whole_machine(card: str, count: int) -> None:
    machine = PROFILES.hardware(f"{count}x {card}")
    assert Hardware.model_validate_json(machine.model_dump_json(by_alias=True)) == machine
    assert [(gpu.index, gpu.name) for gpu in machine.gpus] == [(i, card) for i in range(count)]
    assert len({gpu.uuid for gpu in machine.gpus}) == count
    for gpu in machine.gpus:
        assert gpu.capability
        assert 0.9 * (gpu.total_bytes or 0) < (gpu.free_bytes or 0) < (gpu.total_bytes or 0)
    assert [(link.a, link.b) for link in machine.links] == [
        (a, b) for a in range(count) for b in range(a + 1, count)
    ]
    assert machine.ram_total_bytes >= machine.ram_available_bytes > 0


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("6x4090", {(None, False)}),  # as in 2x4090, whose driver refuses peer-to-peer
        ("2x2080ti", {(0, False)}),
        ("6xh100", {(18, True)}),
        ("2xv100-32g", {(6, True)}),
        ("4xl40s", {(0, None)}),  # no machine with several is known
        ("2xh100nvl", {(0, None)}),  # its bridge is not for sure
        ("a100-80g+h100", {(0, None)}),
        ("2x3090 24GB NVLink", {(4, True)}),
        ("2x A6000 NVLink", {(4, True)}),
        ("4x3090 nvlink", {(0, False)}),  # a bridge joins two, and the name says not which
        ("2x4090 nvlink", {(None, False)}),
        ("2x h100 1g.10gb", {(0, False)}),
    ],
)
def test_links_are_those_of_known_machines_or_unknown(
    name: str, links: set[tuple[int | None, bool | None]]
) -> None:
    assert {(link.nvlinks, link.p2p) for link in PROFILES.hardware(name).links} == links


def test_each_assumption_about_a_machine_is_noted() -> None:
    notes = " ".join(PROFILES.hardware("2xl40").notes)
    assert "not a reading of this host" in notes
    assert "free memory of NVIDIA L40 is an estimate: 97% of all" in notes
    assert "RAM is an assumption" in notes
    notes_of_4090 = " ".join(PROFILES.hardware("3x4090").notes)
    assert "estimate" not in notes_of_4090
    assert "those of the most similar machine" in notes_of_4090


def test_nvlink_that_the_cards_lack_is_noted() -> None:
    assert "cards without NVLink" in " ".join(PROFILES.hardware("2x4090 nvlink").notes)
    assert "cards without NVLink" not in " ".join(PROFILES.hardware("2x3090 nvlink").notes)


def test_the_host_of_an_unknown_card_is_unknown() -> None:
    machine = PROFILES.hardware("gb200")
    assert (machine.arch, machine.cpu_name, machine.cpu_features) == ("aarch64", None, ())
