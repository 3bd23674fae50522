"""The user of a GPU is named with the remedy; GPUs that are measured together."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Gpu, GpuProcess, Link
from gateway.domain.units import GIB
from gateway.measuring.calibration.gpu_set import busy_gpus, gpu_sets
from tests.support.makers import machine

UUID = "GPU-0"


def gpu(index: int = 0, **changes: Any) -> Gpu:
    fields: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "card",
        "total_bytes": 24 * GIB,
        "free_bytes": 24 * GIB,
    }
    return Gpu.model_validate({**fields, **changes})


def user_of(**changes: Any) -> str | None:
    hardware = machine("3090").evolve(gpus=(gpu(**changes),))
    return busy_gpus(hardware, {}).get(UUID)


def test_an_idle_gpu_and_one_with_a_desktop_are_free() -> None:
    desktop = (
        GpuProcess(pid=1, name="Xorg", used_bytes=GIB // 4),
        GpuProcess(pid=2, name="gnome-shell", used_bytes=GIB // 4),
    )
    assert user_of() is None
    assert user_of(processes=desktop, free_bytes=23 * GIB) is None
    assert user_of(total_bytes=None, free_bytes=None, processes=None) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"processes": (GpuProcess(pid=7, name="python3", used_bytes=20 * GIB),)},
            "python3 (7) use 20.00 GiB of its memory",
        ),
        ({"free_bytes": 4 * GIB}, "processes that this user cannot see use 19.00 GiB"),
        ({"total_bytes": 3 * GIB, "free_bytes": 2 * GIB - 1}, "a measurement needs 2.00 GiB"),
        ({"mig": True}, "without a MIG device"),
        ({"lost": "Xid 79"}, "Xid 79"),
        ({"kept": "FITSERVE_GPUS"}, "FITSERVE_GPUS"),
    ],
)
def test_the_user_of_a_gpu_is_named(changes: dict[str, Any], words: str) -> None:
    assert words in (user_of(**changes) or "")


def test_memory_of_the_host_is_used_by_everybody() -> None:
    assert user_of(memory_kind="unified", total_bytes=128 * GIB, free_bytes=40 * GIB) is None


def test_the_gateways_own_engine_on_a_gpu_is_named() -> None:
    hardware = machine("2x3090")
    holders = {hardware.gpus[1].uuid: "m runs on it"}
    assert busy_gpus(hardware, holders) == holders


def test_pairs_of_each_way_and_groups_that_grow() -> None:
    """Bridges join 0 and 1, 2 and 3; a process sees one MIG device at most."""
    cards = [gpu(index) for index in range(4)]
    bridges = [Link(a=0, b=1, nvlinks=4, p2p=True), Link(a=2, b=3, nvlinks=4, p2p=True)]
    parts = [gpu(8, uuid="MIG-1", mig=True), gpu(9, uuid="MIG-2", mig=True)]
    whole, *single_sets = gpu_sets([*cards, *parts], bridges)
    assert [gpu.uuid for gpu in whole.gpus] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert whole.groups == ((0, 1), (0, 2), (0, 1, 2, 3))
    assert [(gpu_set.gpus[0].uuid, gpu_set.groups) for gpu_set in single_sets] == [
        ("MIG-1", ()),
        ("MIG-2", ()),
    ]


def test_eight_equal_gpus_are_measured_by_twos_fours_and_all() -> None:
    hardware = machine("8xh100")
    (whole,) = gpu_sets(hardware.gpus, hardware.links)
    assert whole.groups == ((0, 1), (0, 1, 2, 3), tuple(range(8)))


def test_equal_cards_among_unlike_ones_come_first() -> None:
    (whole,) = gpu_sets([gpu(0, name="b"), gpu(1, name="a"), gpu(2, name="b")], [])
    assert [gpu.index for gpu in whole.gpus] == [1, 0, 2]
    assert whole.groups == ((0, 1), (1, 2), (0, 1, 2))
