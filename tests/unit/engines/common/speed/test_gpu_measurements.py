"""Measurements take the place of a data sheet, on the scale on which the parts of peaks were
fitted."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.domain import Fact, Gpu, Hardware
from gateway.engines.common.speed.gpu_measurements import (
    MachineMeasurements,
    cards,
    link_class,
    uuids,
)
from gateway.engines.common.speed.machine import (
    LinkEfficiency,
    Machine,
    ReferenceFigures,
    SpeedKnowledge,
    build_machine,
)
from gateway.profiles.profiles import Profiles
from tests.support.makers import machine

WIRE = LinkEfficiency(part=0.75, latency_s=12e-6)
REFERENCE = ReferenceFigures(
    source="made up",
    memory=0.86,
    flops={"bfloat16": 0.75, "fp8": 0.65, "int8": 0.65},
    nvlink=WIRE,
    launch_s=4e-6,
)
PROFILES = Profiles()
PACE = SpeedKnowledge(
    PROFILES.card_table, PROFILES.speed_knowledge.table.evolve(reference=REFERENCE)
)
DAY = 1_795_000_000.0
H100, GEFORCE = machine("8xh100"), machine("2x3090")


def fact(subject: str, group: Iterable[Gpu], value: float, **scope: str) -> Fact:
    about = {"what": subject, "gpus": uuids(group), **scope}
    return Fact(
        kind="machine_speed", scope=about, value=round(value), grade="verified", source="x", at=DAY
    )


def reduce_facts(hardware: Hardware, group: list[Gpu], **nanoseconds: int) -> list[Fact]:
    links = {frozenset((link.a, link.b)): link for link in hardware.links}
    about = {"cards": cards(group), "links": link_class(group, links)}
    return [
        fact("all_reduce", group, time_ns, bytes=size.removeprefix("b"), **about)
        for size, time_ns in nanoseconds.items()
    ]


def make_machine(
    hardware: Hardware,
    count: int,
    facts: Iterable[Fact] = (),
    *,
    direct: bool = True,
    gpus: Any = None,
) -> Machine | None:
    links = {frozenset((link.a, link.b)): link for link in hardware.links}
    return build_machine(
        gpus or hardware.gpus[:count],
        links,
        PACE,
        MachineMeasurements(facts),
        has_direct_links=direct,
    )


def test_a_card_that_reaches_as_much_as_the_reference_is_its_data_sheet() -> None:
    gpu = H100.gpus[0]
    facts = [
        fact("memory", [gpu], 3350e9 * REFERENCE.memory),
        fact("fp8", [gpu], 1979e12 * REFERENCE.flops["fp8"]),
    ]
    facts += [
        fact("bfloat16", [gpu], 989e12 * REFERENCE.flops["bfloat16"]),
        fact("launch", [gpu], REFERENCE.launch_s * 1e9),
    ]
    machine_before, machine_after = make_machine(H100, 1), make_machine(H100, 1, facts)
    assert machine_before is not None
    assert machine_after is not None
    assert machine_before.source == "data sheet of NVIDIA H100 80GB HBM3"
    assert (
        machine_after.source
        == "memory, bfloat16, fp8 measured here on 2026-11-18; else data sheet of NVIDIA H100 80GB"
        " HBM3"
    )
    assert machine_after.memory == pytest.approx(machine_before.memory, rel=1e-3)
    assert machine_after.launch == pytest.approx(1)
    assert dict(machine_after.flops) == pytest.approx(dict(machine_before.flops), rel=1e-2)


def test_a_slower_card_is_slower() -> None:
    before, after = (
        make_machine(H100, 1, facts)
        for facts in ([], [fact("memory", [H100.gpus[0]], 2000e9 * REFERENCE.memory)])
    )
    assert before is not None
    assert after is not None
    assert (round(before.memory / 1e9), round(after.memory / 1e9)) == (3350, 2000)


def test_a_card_that_nobody_wrote_down_has_a_speed_once_it_is_measured() -> None:
    gpu = GEFORCE.gpus[0].evolve(name="NVIDIA Nobody 9000")
    memory, half = fact("memory", [gpu], 900e9), fact("float16", [gpu], 100e12)
    assert make_machine(GEFORCE, 1, gpus=[gpu]) is None
    assert make_machine(GEFORCE, 1, [memory], gpus=[gpu]) is None
    machine = make_machine(GEFORCE, 1, [memory, half], gpus=[gpu])
    assert machine is not None
    assert machine.memory == pytest.approx(900e9 / REFERENCE.memory)
    assert machine.flops == pytest.approx(
        dict.fromkeys(("bfloat16", "float16"), 100e12 / REFERENCE.flops["bfloat16"])
    )
    assert machine.source == "memory, float16 measured here on 2026-11-18"


def test_measured_nvlink_is_on_the_scale_of_the_fit() -> None:
    """2 (n - 1) / n x 64 MiB in 301 us less the latency are 450 GB/s and the part of them that the
    reference has."""
    two, of = list(H100.gpus[:2]), WIRE
    latency = of.latency_s * 1e9
    time_ns = latency + (1 << 26) / (450e9 * of.part) * 1e9
    machine_before = make_machine(H100, 2)
    machine_after = make_machine(
        H100, 2, reduce_facts(H100, two, b16384=round(latency), b67108864=round(time_ns))
    )
    assert machine_before is not None
    assert machine_before.wire is not None
    assert machine_after is not None
    assert machine_after.wire is not None
    assert machine_after.wire.bytes_s == pytest.approx(machine_before.wire.bytes_s, rel=1e-2)
    assert machine_after.wire.latency_s == pytest.approx(machine_before.wire.latency_s, rel=1e-2)
    assert (
        machine_after.source
        == "all-reduce measured here on 2026-11-18; else data sheet of NVIDIA H100 80GB HBM3"
    )


def test_other_gpus_with_the_same_links_are_as_fast() -> None:
    facts = reduce_facts(H100, list(H100.gpus[:2]), b16384=10_000, b67108864=300_000)
    machine, more = make_machine(H100, 2, facts, gpus=H100.gpus[4:6]), make_machine(H100, 4, facts)
    assert machine is not None
    assert more is not None
    assert machine.source.startswith("all-reduce measured here")
    assert more.source.startswith("data sheet")


@pytest.mark.parametrize("direct", [True, False])
def test_the_measured_all_reduce_over_pcie_is_the_engines(direct: bool) -> None:
    facts = reduce_facts(GEFORCE, list(GEFORCE.gpus), b16384=30_000, b67108864=10_030_000)
    machine = make_machine(GEFORCE, 2, facts, direct=direct)
    assert machine is not None
    assert machine.wire is not None
    assert machine.wire.latency_s == pytest.approx(30e-6)
    assert machine.wire.bytes_s == pytest.approx((1 << 26) / 0.01, rel=1e-2)


def test_a_measurement_with_p2p_says_nothing_of_ranks_without() -> None:
    joined_gpus = GEFORCE.evolve(links=tuple(link.evolve(p2p=True) for link in GEFORCE.links))
    facts = reduce_facts(joined_gpus, list(joined_gpus.gpus), b16384=30_000, b67108864=10_030_000)
    ways = [make_machine(joined_gpus, 2, facts, direct=direct) for direct in (True, False)]
    assert [way.source.startswith("all-reduce measured") for way in ways if way] == [True, False]


def test_only_measurements_that_need_no_reference_are_taken_without_one() -> None:
    pace = SpeedKnowledge(PROFILES.card_table, PACE.table.evolve(reference=None))
    facts = [
        *reduce_facts(GEFORCE, list(GEFORCE.gpus), b16384=30_000, b67108864=10_030_000),
        fact("memory", GEFORCE.gpus[:1], 1e9),
    ]
    links = {frozenset((link.a, link.b)): link for link in GEFORCE.links}
    speed_machine = build_machine(
        GEFORCE.gpus, links, pace, MachineMeasurements(facts), has_direct_links=False
    )
    assert speed_machine is not None
    assert speed_machine.memory == 936.2e9
    assert (
        speed_machine.source
        == "all-reduce measured here on 2026-11-18; else data sheet of NVIDIA GeForce RTX 3090"
    )
    gpu = GEFORCE.gpus[0].evolve(name="NVIDIA Nobody 9000")
    lone_machine = build_machine(
        [gpu],
        {},
        pace,
        MachineMeasurements([fact("memory", [gpu], 9e11), fact("float16", [gpu], 1e14)]),
        has_direct_links=False,
    )
    assert lone_machine is not None
    assert (lone_machine.memory, lone_machine.flops["bfloat16"]) == (9e11, 1e14)


def test_days_are_those_of_the_calendar() -> None:
    seconds = [
        0,
        951_782_399,
        951_782_400,
        951_868_800,
        4_107_542_400,
        *range(1_700_000_000, 1_900_000_000, 7_654_321),
    ]
    measurements = MachineMeasurements(
        fact("memory", [], 1).evolve(scope={"what": "memory", "gpus": str(at)}, at=float(at))
        for at in seconds
    )
    for at in seconds:
        number = measurements.number(H100.gpus[0].evolve(uuid=str(at)), "memory")
        assert number is not None
        assert number.day == datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def test_the_last_measurement_counts_and_one_size_alone_says_nothing() -> None:
    gpu = H100.gpus[0]
    twice = MachineMeasurements([fact("memory", [gpu], 1), fact("memory", [gpu], 2)])
    number = twice.number(gpu, "memory")
    assert number is not None
    assert number.value == 2
    measurements = MachineMeasurements(reduce_facts(H100, list(H100.gpus[:2]), b16384=10_000))
    assert measurements.all_reduce(H100.gpus[:2], {frozenset((0, 1)): H100.links[0]}) is None
