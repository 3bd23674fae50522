"""Which GPUs can be measured now, and which of them together. Pure.

in_use(hardware, holders)    by UUID why a GPU is left alone, and what to do
sets(gpus, links)            those that are measured by one child, with the groups whose all-reduces are timed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from gateway.domain import Gpu, Hardware, Link
from gateway.domain.units import GIB, gib
from gateway.engines.common.speed.measured import cards, reach

NEEDED_BYTES = 2 * GIB
"""What measuring takes of a GPU, with CUDA's own part."""
# A desktop has less of a GPU, and asks it for little; whether it asked for too much shows in how
# measurements vary.
_DESKTOP_BYTES = GIB
# Of pairs that reach each other in another way than those before.
_MOST_PAIRS = 8


class GpuSet(NamedTuple):
    """GPUs that are measured at the same time. groups: of indices into `gpus`."""

    gpus: tuple[Gpu, ...]
    links: Mapping[frozenset[int], Link]
    groups: tuple[tuple[int, ...], ...]


def in_use(hardware: Hardware, holders: Mapping[str, str]) -> dict[str, str]:
    """holders: by UUID what the gateway has on the GPU, and what to do about it."""
    found = {}
    for gpu in hardware.gpus:
        if why := gpu.lost or gpu.kept or holders.get(gpu.uuid) or _others(gpu):
            found[gpu.uuid] = why
    return found


def _others(gpu: Gpu) -> str | None:
    if gpu.mig and gpu.uuid.startswith("GPU-"):
        return "it is in MIG mode and has no MIG device: make one (`nvidia-smi mig -cgi`)"
    users = [one for one in gpu.processes or () if (one.used_bytes or 0) > 0]
    taken = sum(one.used_bytes or 0 for one in users)
    if (
        gpu.memory_kind == "dedicated"
        and gpu.total_bytes is not None
        and gpu.free_bytes is not None
    ):
        taken = max(taken, gpu.total_bytes - gpu.free_bytes - _DESKTOP_BYTES)
    if taken > _DESKTOP_BYTES:
        names = (
            ", ".join(f"{one.name or 'a process'} ({one.pid})" for one in users)
            or "processes that this user cannot see"
        )
        return (
            f"{gib(taken)} of it are in use by {names}: end them first, or measure when they are"
            " done"
        )
    if gpu.free_bytes is not None and gpu.free_bytes < NEEDED_BYTES:
        return (
            f"{gib(gpu.free_bytes)} of it are free, and measuring takes {gib(NEEDED_BYTES)}: free"
            " some"
        )
    return None


def sets(gpus: Sequence[Gpu], links: Iterable[Link]) -> Iterator[GpuSet]:
    """All whole GPUs together. A process sees one MIG device at most, so each is alone."""
    between = {frozenset((link.a, link.b)): link for link in links}
    whole = tuple(
        sorted((gpu for gpu in gpus if not gpu.mig), key=lambda gpu: (gpu.name, gpu.index))
    )
    if whole:
        yield GpuSet(whole, between, tuple(_groups(whole, between)))
    yield from (GpuSet((gpu,), {}, ()) for gpu in gpus if gpu.mig)


def _groups(gpus: Sequence[Gpu], links: Mapping[frozenset[int], Link]) -> Iterator[tuple[int, ...]]:
    """Two of each way to reach each other; then 4, 8, ... and all."""
    ways: dict[tuple[str, str], tuple[int, ...]] = {}
    for pair in combinations(range(len(gpus)), 2):
        two = [gpus[one] for one in pair]
        ways.setdefault((cards(two), reach(two, links)), pair)
    yield from [*ways.values()][:_MOST_PAIRS]
    sizes = [size for size in (4, 8, 16) if size < len(gpus)]
    yield from (tuple(range(size)) for size in (*sizes, *([len(gpus)] if len(gpus) > 2 else [])))
