"""Machines that clouds rent, by the names of the clouds."""

from __future__ import annotations

import pytest

from gateway.errors import BadRequest
from gateway.profiles.cloud_instances import InstanceFamily
from gateway.profiles.profiles import Profiles

PROFILES = Profiles()
TABLE = PROFILES.instances


@pytest.mark.parametrize(
    ("name", "card", "count"),
    [
        ("g6e.12xlarge", "NVIDIA L40S", 4),
        ("ml.g6.48xlarge", "NVIDIA L4", 8),
        ("p5.48xlarge", "NVIDIA H100 80GB HBM3", 8),
        ("p4d.24xlarge", "NVIDIA A100-SXM4-40GB", 8),
        ("p6-b300.48xlarge", "NVIDIA B300 SXM6 AC", 8),
        ("a2-ultragpu-4g", "NVIDIA A100-SXM4-80GB", 4),
        ("a2-megagpu-16g", "NVIDIA A100-SXM4-40GB", 16),
        ("a3-highgpu-8g", "NVIDIA H100 80GB HBM3", 8),
        ("g2-standard-48", "NVIDIA L4", 4),
        ("Standard_NC80adis_H100_v5", "NVIDIA H100 NVL", 2),
        ("Standard_ND96amsr_A100_v4", "NVIDIA A100-SXM4-80GB", 8),
        ("Standard_ND96asr_v4", "NVIDIA A100-SXM4-40GB", 8),
        ("Standard_NC24s_v3", "Tesla V100-PCIE-16GB", 4),
    ],
)
def test_the_name_of_a_rented_machine_is_its_cards(name: str, card: str, count: int) -> None:
    assert [gpu.name for gpu in PROFILES.hardware(name).gpus] == [card] * count


@pytest.mark.parametrize("family", TABLE.families, ids=lambda family: family.name)
def test_every_family_has_a_described_card(family: InstanceFamily) -> None:
    assert family.card in {card.name for card in PROFILES.card_table.cards}
    assert family.name.count("SIZE") == 1
    assert family.name == family.name.lower().replace("size", "SIZE")


def test_families_are_listed_once() -> None:
    names = [family.name for family in TABLE.families]
    assert len(names) == len(set(names))


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequest, match=r"g6e\.13xlarge is not a size of its family: xlarge, 2x"):
        PROFILES.hardware("g6e.13xlarge")
    assert TABLE.cards_of("m7i.large") is None
    assert TABLE.cards_of("4x4090") is None
