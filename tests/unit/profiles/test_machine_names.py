"""Names of machines as people write them."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest, NotFound
from gateway.profiles.profiles import Profiles
from tests.support.fake_nvml import MIB
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import published_model

PROFILES = Profiles()
CARDS = PROFILES.card_table.cards
DOUBLED = {2 * 24564, 2 * 11264, 2 * 10240}
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
        ("dual 3090s", {"NVIDIA GeForce RTX 3090": 2}),
        ("two l4s", {"NVIDIA L4": 2}),
        ("2 H100", {"NVIDIA H100 80GB HBM3": 2}),
        ("H100:2", {"NVIDIA H100 80GB HBM3": 2}),
        ("4\u00d7L20", {"NVIDIA L20": 4}),
        ("RTX 6000 Ada (48GB) x2", {"NVIDIA RTX 6000 Ada Generation": 2}),
        ("RTX 6000 Ada x2 48GB", {"NVIDIA RTX 6000 Ada Generation": 2}),
        ("L40S 8 GPUs", {"NVIDIA L40S": 8}),
        ("8 gpus of l40s", {"NVIDIA L40S": 8}),
        ("2x3090 24GB NVLink", {"NVIDIA GeForce RTX 3090": 2}),
        ("3090 pcie x8", {"NVIDIA GeForce RTX 3090": 1}),
        ("2x A5000 and 1x A4000", {"NVIDIA RTX A5000": 2, "NVIDIA RTX A4000": 1}),
        ("A6000 48GB + 3090", {"NVIDIA RTX A6000": 1, "NVIDIA GeForce RTX 3090": 1}),
        ("H100 SXM5", {"NVIDIA H100 80GB HBM3": 1}),
        ("gpu_8x_h100_sxm5", {"NVIDIA H100 80GB HBM3": 8}),
        ("DGX H100", {"NVIDIA H100 80GB HBM3": 8}),
        ("2x DGX B200", {"NVIDIA B200": 2}),
        ("GB300 NVL4", {"NVIDIA GB300": 4}),
        ("H20-3e x8", {"NVIDIA H20-3e": 8}),
        ("RTX 5070 Ti laptop", {"NVIDIA GeForce RTX 5070 Ti Laptop GPU": 1}),
        ("RTX 4090 Laptop GPU 16GB", {"NVIDIA GeForce RTX 4090 Laptop GPU": 1}),
        ("4090 mobile", {"NVIDIA GeForce RTX 4090 Laptop GPU": 1}),
        ("RTX 4090D", {"NVIDIA GeForce RTX 4090 D": 1}),
        ("RTX PRO 6000 WS", {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 1}),
        ("V100S", {"Tesla V100S-PCIE-32GB": 1}),
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


@pytest.mark.parametrize(
    ("name", "count", "mebibytes"),
    [
        ("4x4090 48GB", 4, 2 * 24564),
        ("4090D 48GB", 1, 2 * 24564),
        ("2080Ti 22G*2", 2, 2 * 11264),
        ("2\u00d7 RTX 3080 20GB", 2, 2 * 10240),
        ("RTX 3080 12GB", 1, 12288),
        ("4060 ti 8gb", 1, 8188),
        ("4060 ti 16gb", 1, 16380),
        ("v100 32gb", 1, 32768),
    ],
)
def test_the_memory_of_a_name_is_that_of_the_card(name: str, count: int, mebibytes: int) -> None:
    machine = PROFILES.hardware(name)
    assert [(gpu.total_bytes or 0) // MIB for gpu in machine.gpus] == [mebibytes] * count
    assert any("instead of" in note for note in machine.notes) == (mebibytes in DOUBLED)


@pytest.mark.parametrize("name", ["4090 32gb", "a100 48gb", "5070 ti 12gb", "h100 160gb"])
def test_a_memory_that_no_card_of_the_name_has_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=r"No card of the name .* has this memory: .*GB\)"):
        PROFILES.hardware(name)


def test_a_memory_in_many_words_is_read_in_one_pass() -> None:
    """Each of these words is a word of the card and a memory: 2 ** 30 ways to read them."""
    machine = PROFILES.hardware("a100 sxm4 " + "80gb " * 30)
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA A100-SXM4-80GB"]


@pytest.mark.parametrize("name", ["rtx 6000", "2x rtx 4000", "titan"])
def test_words_of_several_generations_are_a_question(name: str) -> None:
    with pytest.raises(BadRequest, match=r"names cards of several generations: NVIDIA .* GB\)"):
        PROFILES.hardware(name)


@pytest.mark.parametrize(
    ("name", "card", "count", "eighths"),
    [
        ("H100 MIG 3g.40gb", "h100", 1, 4),
        ("1g.10gb of H100", "h100", 1, 1),
        ("2x a100 80gb 1g.20gb", "a100 80gb", 2, 2),
        ("H200 MIG 7g.141gb", "h200", 1, 8),
    ],
)
def test_a_part_of_a_card_has_its_part_of_the_memory(
    name: str, card: str, count: int, eighths: int
) -> None:
    machine = PROFILES.hardware(name)
    whole_bytes = PROFILES.hardware(card).gpus[0].total_bytes or 0
    assert [gpu.total_bytes for gpu in machine.gpus] == [whole_bytes * eighths // 8] * count
    assert all(gpu.mig and gpu.uuid.startswith("MIG-") for gpu in machine.gpus)
    assert not any(link.p2p for link in machine.links)


@pytest.mark.parametrize("name", ["3090 1g.6gb", "H100 3g.20gb", "a100 40gb 5g.20gb", "t4 1g.2gb"])
def test_a_part_that_the_card_lacks_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=r"has no part \dg\."):
        PROFILES.hardware(name)


def test_a_snapshot_goes_before_a_composition() -> None:
    assert PROFILES.hardware("2 x RTX 3090") == PROFILES.hardware("2x3090")
    assert PROFILES.hardware("2x NVIDIA H200").cpu_name == PROFILES.hardware("8xh200").cpu_name


def test_machines_of_a_cluster_may_be_composed() -> None:
    cluster = PROFILES.cluster("2x(6x4090)+(spark)", None)
    assert cluster
    assert [len(node.hardware.gpus) for node in cluster.nodes] == [6, 6, 1]
    for name in ("2xspark", "DGX Spark x2", "2 DGX Sparks", "dual gb10"):
        pair = PROFILES.cluster(name, None)
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


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("2x1060", "Pascal"),
        ("gtx 1080 ti", "Pascal"),
        ("Tesla P40", "Pascal"),
        ("4x p100", "Pascal"),
        ("titan xp", "Pascal"),
        ("quadro p6000", "Pascal"),
        ("980 ti", "Maxwell"),
        ("2x m40 24gb", "Maxwell"),
        ("gtx titan x", "Maxwell"),
        ("tesla k80", "Kepler"),
        ("3090+1080", "Pascal"),
    ],
)
def test_a_card_before_volta_is_refused_by_its_generation(name: str, generation: str) -> None:
    with pytest.raises(BadRequest, match=f"card of the {generation} generation.* need Volta"):
        PROFILES.hardware(name)


def test_no_engine_is_compiled_for_a_card_before_volta() -> None:
    machine = PROFILES.hardware("3090")
    old_gpus = tuple(gpu.evolve(capability="6.1") for gpu in machine.gpus)
    decision = decide(
        published_model("llama-3.2-1b"),
        machine.evolve(gpus=old_gpus),
        PROFILES.engines(device="cuda"),
        wish(),
    )
    assert {rejection.verdict for rejection in decision.rejected} == {"no_kernel"}
    assert not decision.plans


def test_an_unknown_name_is_refused_with_a_near_one() -> None:
    with pytest.raises(NotFound, match="No machine or card is named 4091; did you mean 4090"):
        PROFILES.hardware("4091")
    for name in ("quadro", "quadro 4000", "laptop", "blackwell", "sxm5", "24gb"):
        with pytest.raises(NotFound, match="--hardware list"):
            PROFILES.hardware(name)


def test_a_name_too_long_for_a_file_is_unknown() -> None:
    with pytest.raises(NotFound):
        PROFILES.hardware("x" * 300)


def test_a_gpu_with_shared_memory_joins_no_other_gpu() -> None:
    with pytest.raises(BadRequest, match="Several machines are written"):
        PROFILES.hardware("gb10+4090")


@given(st.one_of(st.text(max_size=30), st.lists(st.sampled_from(WORDS), max_size=8).map("".join)))
def test_any_text_is_a_machine_or_refused(text: str) -> None:
    if "/" in text or text.endswith(".json"):
        return
    with contextlib.suppress(BadRequest, NotFound):
        assert PROFILES.cluster(text, None) or PROFILES.hardware(text).gpus or text == "cpu"
