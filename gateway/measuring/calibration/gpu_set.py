"""Sets of GPUs to measure together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from gateway.domain import Gpu, Hardware, Link
from gateway.domain.units import GIB, gib
from gateway.engines.common.speed.gpu_measurements import cards, link_class

NEEDED_BYTES = 2 * GIB
"""GPU memory for a measurement, with the part of CUDA."""
# A desktop uses less memory. If it also uses the GPU much, the measurements vary.
_DESKTOP_BYTES = GIB
# The most pairs with different links.
_MAX_PAIRS = 8


class GpuSet(NamedTuple):
    """GPUs that one child measures. groups: indices into `gpus` for all-reduces."""

    gpus: tuple[Gpu, ...]
    links: Mapping[frozenset[int], Link]
    groups: tuple[tuple[int, ...], ...]


def busy_gpus(hardware: Hardware, holders: Mapping[str, str]) -> dict[str, str]:
    """The reason and advice for each GPU that cannot be measured, by UUID. holders: reasons known
    by the gateway."""
    reasons = {}
    for gpu in hardware.gpus:
        if (
            reason := gpu.loss_reason
            or gpu.reservation_reason
            or holders.get(gpu.uuid)
            or _busy_reason(gpu)
        ):
            reasons[gpu.uuid] = reason
    return reasons


def _busy_reason(gpu: Gpu) -> str | None:
    if gpu.mig and gpu.uuid.startswith("GPU-"):
        return "it is in MIG mode without a MIG device: create one (`nvidia-smi mig -cgi`)"
    users = [process for process in gpu.processes or () if (process.used_bytes or 0) > 0]
    used_bytes = sum(process.used_bytes or 0 for process in users)
    if (
        gpu.memory_kind == "dedicated"
        and gpu.total_bytes is not None
        and gpu.free_bytes is not None
    ):
        used_bytes = max(used_bytes, gpu.total_bytes - gpu.free_bytes - _DESKTOP_BYTES)
    if used_bytes > _DESKTOP_BYTES:
        names = (
            ", ".join(f"{process.name or 'a process'} ({process.pid})" for process in users)
            or "processes that this user cannot see"
        )
        return f"{names} use {gib(used_bytes)} of its memory: end them first, or measure later"
    if gpu.free_bytes is not None and gpu.free_bytes < NEEDED_BYTES:
        return (
            f"{gib(gpu.free_bytes)} of its memory are free, and a measurement needs"
            f" {gib(NEEDED_BYTES)}: free some"
        )
    return None


def gpu_sets(gpus: Sequence[Gpu], links: Iterable[Link]) -> Iterator[GpuSet]:
    """The sets of these GPUs. A process sees only one MIG device, so each is a set."""
    links_by_pair = {frozenset((link.a, link.b)): link for link in links}
    whole_gpus = tuple(
        sorted((gpu for gpu in gpus if not gpu.mig), key=lambda gpu: (gpu.name, gpu.index))
    )
    if whole_gpus:
        yield GpuSet(whole_gpus, links_by_pair, tuple(_measured_groups(whole_gpus, links_by_pair)))
    yield from (GpuSet((gpu,), {}, ()) for gpu in gpus if gpu.mig)


def _measured_groups(
    gpus: Sequence[Gpu], links: Mapping[frozenset[int], Link]
) -> Iterator[tuple[int, ...]]:
    """A pair for each kind of link; then 4, 8, 16 and all GPUs."""
    ways: dict[tuple[str, str], tuple[int, ...]] = {}
    for pair in combinations(range(len(gpus)), 2):
        two = [gpus[index] for index in pair]
        ways.setdefault((cards(two), link_class(two, links)), pair)
    yield from [*ways.values()][:_MAX_PAIRS]
    sizes = [size for size in (4, 8, 16) if size < len(gpus)]
    yield from (tuple(range(size)) for size in (*sizes, *([len(gpus)] if len(gpus) > 2 else [])))
