"""Names of machines as people write them."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest, NotFound
from gateway.profiles.profiles import Profiles

PROFILES = Profiles()
CARDS = PROFILES.card_table.cards
WORDS = ["rtx", "4090", "h100", "x", "2", "+", " ", "80g", "(", ")", "ti", "super", "gb10", "*"]


@pytest.mark.parametrize(
    ("name", "cards"),
    [
        ("h100", {"NVIDIA H100 80GB HBM3": 1}),
        ("H100x8", {"NVIDIA H100 80GB HBM3": 8}),
        ("h100 nvl", {"NVIDIA H100 NVL": 1}),
        ("2xh100nvl", {"NVIDIA H100 NVL": 2}),
        ("a100sxm", {"NVIDIA A100-SXM4-80GB": 1}),
        ("rtx4070tisuper16gb", {"NVIDIA GeForce RTX 4070 Ti SUPER": 1}),
        ("6x4090", {"NVIDIA GeForce RTX 4090": 6}),
        ("rtx 4090", {"NVIDIA GeForce RTX 4090": 1}),
        ("RTX4090", {"NVIDIA GeForce RTX 4090": 1}),
        ("NVIDIA GeForce RTX 4090 x 2", {"NVIDIA GeForce RTX 4090": 2}),
        ("2 x rtx 3090 + 5090", {"NVIDIA GeForce RTX 3090": 2, "NVIDIA GeForce RTX 5090": 1}),
        ("3090+4090", {"NVIDIA GeForce RTX 3090": 1, "NVIDIA GeForce RTX 4090": 1}),
        ("8x a100-40g", {"NVIDIA A100-SXM4-40GB": 8}),
        ("a100 pcie 80gb", {"NVIDIA A100 80GB PCIe": 1}),
        ("4070 ti super", {"NVIDIA GeForce RTX 4070 Ti SUPER": 1}),
        ("4060ti", {"NVIDIA GeForce RTX 4060 Ti": 1}),
        ("2080ti", {"NVIDIA GeForce RTX 2080 Ti": 1}),
        ("rtx 6000 ada", {"NVIDIA RTX 6000 Ada Generation": 1}),
        ("4x pro 6000", {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 4}),
        ("pro6000 max-q", {"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 1}),
        ("l40", {"NVIDIA L40": 1}),
        ("2xL40S", {"NVIDIA L40S": 2}),
        ("DGX Spark", {"NVIDIA GB10": 1}),
    ],
)
def test_the_words_of_cards_and_counts_are_a_machine(name: str, cards: dict[str, int]) -> None:
    assert PROFILES.cluster(name, None) is None
    assert Counter(gpu.name for gpu in PROFILES.hardware(name).gpus) == cards


@pytest.mark.parametrize("card", [card.name for card in CARDS])
def test_the_full_name_of_a_card_is_this_card(card: str) -> None:
    assert [gpu.name for gpu in PROFILES.hardware(card).gpus] == [card]


def test_a_name_that_several_cards_fit_names_the_others() -> None:
    notes = PROFILES.hardware("8xh100x1").notes
    assert (
        "taken for NVIDIA H100 80GB HBM3; other cards of this name: NVIDIA H100 PCIe,"
        " NVIDIA H100 NVL"
    ) in notes
    assert not any("taken for" in note for note in PROFILES.hardware("6x4090").notes)


def test_a_snapshot_goes_before_a_composition() -> None:
    assert PROFILES.hardware("2 x RTX 3090") == PROFILES.hardware("2x3090")
    assert PROFILES.hardware("2x NVIDIA H200").cpu_name == PROFILES.hardware("8xh200").cpu_name


def test_machines_of_a_cluster_may_be_composed() -> None:
    cluster = PROFILES.cluster("2x(6x4090)+(spark)", None)
    assert cluster
    assert [len(node.hardware.gpus) for node in cluster.nodes] == [6, 6, 1]
    pair = PROFILES.cluster("2xspark", None)
    assert pair
    assert [node.hardware.gpus[0].name for node in pair.nodes] == ["NVIDIA GB10"] * 2


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("mi300x", "AMD"),
        ("2x rx 7900 xtx", "AMD"),
        ("strix halo", "AMD"),
        ("arc b580", "Intel"),
        ("gaudi3", "Intel"),
        ("m4 max", "Apple"),
    ],
)
def test_cards_of_other_makers_are_refused(name: str, maker: str) -> None:
    with pytest.raises(BadRequest, match=f"a GPU of {maker}, and fitserve plans only for NVIDIA"):
        PROFILES.hardware(name)


@pytest.mark.parametrize("name", ["0x4090", "65x4090", "4090+64x3090"])
def test_a_machine_has_a_GPU_and_a_bounded_number(name: str) -> None:  # noqa: N802
    with pytest.raises(BadRequest, match="no GPU, or more than 64"):
        PROFILES.hardware(name)


def test_an_unknown_name_is_refused_with_a_near_one() -> None:
    with pytest.raises(NotFound, match="No machine or card is named 4091; did you mean 4090"):
        PROFILES.hardware("4091")
    with pytest.raises(NotFound, match="--hardware list"):
        PROFILES.hardware("2x2060")


def test_a_gpu_with_shared_memory_joins_no_other_gpu() -> None:
    with pytest.raises(BadRequest, match="Several machines are written"):
        PROFILES.hardware("gb10+4090")


@given(st.one_of(st.text(max_size=30), st.lists(st.sampled_from(WORDS), max_size=8).map("".join)))
def test_any_text_is_a_machine_or_refused(text: str) -> None:
    if "/" in text or text.endswith(".json"):
        return
    with contextlib.suppress(BadRequest, NotFound):
        assert PROFILES.cluster(text, None) or PROFILES.hardware(text).gpus or text == "cpu"
