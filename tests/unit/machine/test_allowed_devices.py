"""Which GPUs are kept from fitserve, by its setting and by the variables of CUDA and of the
container toolkit."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.domain import Hardware
from gateway.domain.units import GIB
from gateway.errors import BadRequest, SettingsError
from gateway.machine.allowed_devices import AllowedDevices
from gateway.machine.gpu_watch import GpuWatch
from gateway.machine.probe import probe
from gateway.planner.explain import machine as rows
from gateway.profiles.profiles import Profiles
from tests.support.fake_nvml import MIB, Card, FakeNvml
from tests.support.makers import engine, spec, wish
from tests.support.planning import decide

FIRST, SECOND, THIRD = (f"GPU-{digit * 8}-0000-0000-0000-000000000000" for digit in "abc")


def machine(*names: str, uuids: tuple[str, ...] = (FIRST, SECOND, THIRD)) -> Hardware:
    cards = [
        Card(uuid, f"NVIDIA GeForce RTX {name}") for uuid, name in zip(uuids, names, strict=False)
    ]
    return probe(nvml=FakeNvml(cards))


ALIKE, UNLIKE = machine("3090", "3090", "3090"), machine("3060", "3090")


def allowed_indices(
    hardware: Hardware, setting: str | None = None, **environment: str
) -> list[int]:
    hardware_in_use = AllowedDevices.choose_by_variables(hardware, setting, environment).mark(
        hardware
    )
    return [gpu.index for gpu in hardware_in_use.gpus if gpu.reservation_reason]


@pytest.mark.parametrize(("limit", "visible_gib"), [(None, 8), (3, 3), (9, 8)])
def test_no_more_ram_is_seen_than_the_setting_says(limit: int | None, visible_gib: int) -> None:
    hardware = machine("3090").evolve(ram_total_bytes=8 * GIB, ram_available_bytes=7 * GIB)
    hardware_in_use = AllowedDevices(ram_bytes=None if limit is None else limit * GIB).mark(
        hardware
    )
    assert (hardware_in_use.ram_total_bytes, hardware_in_use.ram_available_bytes) == (
        visible_gib * GIB,
        min(7, visible_gib) * GIB,
    )


@pytest.mark.parametrize(
    ("setting", "left_out"),
    [("0", [1, 2]), ("2,0", [1]), (f" {SECOND} , 0", [2]), (f"0,1,{THIRD}", []), (",", [0, 1, 2])],
)
def test_the_setting_names_gpus_by_index_or_uuid(setting: str, left_out: list[int]) -> None:
    assert allowed_indices(ALIKE, setting) == left_out
    assert allowed_indices(ALIKE, setting, CUDA_VISIBLE_DEVICES="1") == left_out, "the setting wins"


@pytest.mark.parametrize("setting", ["3", "all", "GPU-nonsense", "-1", FIRST[:12]])
def test_a_missing_gpu_is_an_error_that_names_the_present_ones(setting: str) -> None:
    with pytest.raises(SettingsError, match="no such GPU") as error:
        AllowedDevices.choose_by_variables(ALIKE, f"0,{setting}", {})
    assert all(uuid in error.value.hint for uuid in (FIRST, SECOND, THIRD))
    with pytest.raises(SettingsError, match="no such GPU"):
        AllowedDevices.choose_by_variables(probe(nvml=FakeNvml([], init_error=12)), setting, {})


def test_a_card_that_cannot_be_read_keeps_nobody_from_the_others() -> None:
    cards = [Card(FIRST, "A"), Card(SECOND, "A", error=15)]
    hardware = probe(nvml=FakeNvml(cards))
    assert allowed_indices(hardware, "0,1") == []


@pytest.mark.parametrize(
    ("visible", "left_out"),
    [
        ("1", [0, 2]),
        ("", [0, 1, 2]),
        ("-1", [0, 1, 2]),
        ("NoDevFiles", [0, 1, 2]),
        ("2,-1,0", [0, 1]),
        ("0,7,1", [1, 2]),
        ("0,0,1", [1, 2]),
        (f"{SECOND},{FIRST[:12]}", [2]),
        ("0,GPU-", [1, 2]),
    ],
)
def test_cuda_visible_devices_is_read_as_by_cuda(visible: str, left_out: list[int]) -> None:
    assert allowed_indices(ALIKE, CUDA_VISIBLE_DEVICES=visible) == left_out


def test_cudas_numbers_of_unlike_gpus_are_refused_for_they_go_by_speed() -> None:
    with pytest.raises(SettingsError, match="goes by speed"):
        allowed_indices(UNLIKE, CUDA_VISIBLE_DEVICES="0")
    assert allowed_indices(UNLIKE, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [1]
    assert allowed_indices(UNLIKE, CUDA_VISIBLE_DEVICES=SECOND) == [0]


@pytest.mark.parametrize(
    ("visible", "left_out"),
    [
        ("all", []),
        ("void", []),
        ("", []),
        ("0,1,2", []),
        ("5,6,7", []),
        ("1", [0, 2]),
        (SECOND, [0, 2]),
        ("none", [0, 1, 2]),
    ],
)
def test_the_choice_of_the_container_toolkit_is_not_made_again(
    visible: str, left_out: list[int]
) -> None:
    """The numbers of NVIDIA_VISIBLE_DEVICES are the host's; in the container, GPUs are counted
    anew."""
    assert allowed_indices(ALIKE, NVIDIA_VISIBLE_DEVICES=visible) == left_out


def test_mig_devices_are_named_by_their_uuids() -> None:
    part = "MIG-11111111-0000-0000-0000-000000000000"
    other_uuid = "MIG-22222222-0000-0000-0000-000000000000"
    parts = [
        Card(part, "NVIDIA H100 MIG 3g.40gb", total=40000 * MIB),
        Card(other_uuid, "NVIDIA H100 MIG 3g.40gb", total=40000 * MIB),
    ]
    hardware = probe(
        nvml=FakeNvml([Card(FIRST, "NVIDIA H100", (9, 0), mig=True, mig_devices=[*parts])])
    )
    assert [
        gpu.uuid
        for gpu in AllowedDevices.choose_by_variables(hardware, part, {})
        .mark(hardware)
        .usable()
        .gpus
    ] == [part]
    assert [
        gpu.uuid
        for gpu in AllowedDevices.choose_by_variables(
            hardware, None, {"CUDA_VISIBLE_DEVICES": other_uuid}
        )
        .mark(hardware)
        .usable()
        .gpus
    ] == [other_uuid]
    assert allowed_indices(hardware, CUDA_VISIBLE_DEVICES="0") == [1, 2], (
        "which MIG device CUDA means by a number is not known"
    )


def test_nothing_is_planned_on_a_gpu_that_is_kept() -> None:
    hardware = AllowedDevices.choose_by_variables(ALIKE, "1,2", {}).mark(ALIKE)
    decision = decide(spec(), hardware, [engine()], wish())
    assert decision.plans
    assert all(FIRST not in plan.gpus for plan in decision.plans)
    with pytest.raises(BadRequest, match="FITSERVE_GPUS leaves it out"):
        decide(spec(), hardware, [engine()], wish(gpus=(FIRST,)))


def test_a_machine_whose_gpus_are_all_kept_serves_on_its_processor() -> None:
    hardware = AllowedDevices.choose_by_variables(ALIKE, None, {"CUDA_VISIBLE_DEVICES": ""}).mark(
        ALIKE
    )
    assert {engine.device for engine in Profiles().engines_for(hardware)} == {"cpu"}


def test_the_probe_names_withheld_cards_and_their_variable() -> None:
    hardware = AllowedDevices.choose_by_variables(ALIKE, None, {"CUDA_VISIBLE_DEVICES": "0"}).mark(
        ALIKE
    )
    (line,) = [row for row in rows(hardware) if row.name == "GPU 1"]
    assert "kept from fitserve: CUDA_VISIBLE_DEVICES leaves it out" in " ".join(line)


def test_the_choice_at_the_start_holds_by_uuid_when_a_card_drops_off() -> None:
    cards = [Card(FIRST, "A"), Card(SECOND, "A"), Card(THIRD, "A")]
    nvml = FakeNvml(cards)
    watch = GpuWatch(
        nvml, allowed_devices=AllowedDevices.choose_by_variables(probe(nvml=nvml), "1", {})
    )
    del nvml.cards[0]
    assert [gpu.uuid for gpu in watch.hardware(Path("/")).usable().gpus] == [SECOND]
