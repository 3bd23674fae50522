"""A machine that has no snapshot, composed of its cards and of the snapshot most like it. Pure.

A fact without snapshot and data sheet is unknown, or an assumption in the machine's notes.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Sequence

from gateway.domain import Gpu, Hardware, Link, Pcie
from gateway.domain.hardware import ASSUMED_CARD
from gateway.engines.common.kernels.cards import Card
from gateway.errors import BadRequest
from gateway.profiles.gpu_slices import SliceProfile
from gateway.profiles.machine_names import Term

_NAMESPACE = uuid.UUID("2d6f5a52-8d57-4b8c-8a3f-0f8a1b0c7c55")  # any, but always the same
# The driver keeps at most this share of a card's memory, on all cards whose figure is known.
_DRIVER_SHARE = 0.03
_MIN_RAM_BYTES = 64 << 30


def composed_machine(name: str, terms: Sequence[Term], snapshots: Iterable[Hardware]) -> Hardware:
    """A machine with these cards.

    snapshots: machines that are known; cards, links and the host are theirs where one fits.

    Raises BadRequest for several cards of which one shares its memory with the host.
    """
    cards = [term.card for term in terms for _ in range(term.count)]
    if len(cards) > 1 and any(card.has_unified_memory for card in cards):
        raise BadRequest(
            f"{name} is not a machine: a GPU that shares the host's memory is the only one there.",
            hint="Several machines are written 2xgb10, or (gb10)+(4x3090).",
            param="hardware",
        )
    machines = sorted(snapshots, key=lambda machine: len(machine.gpus))
    gpus, gpu_notes = _composed_gpus(name, cards, machines)
    parts = [term.part for term in terms for _ in range(term.count)]
    gpus = tuple(_part_of(gpu, part) for gpu, part in zip(gpus, parts, strict=True))
    links, link_notes = _composed_links(cards, parts, machines)
    similar_machine = _similar_machine(cards, machines)
    ram_bytes, host_notes = _composed_ram(similar_machine, gpus)
    host = similar_machine or machines[-1].evolve(
        arch=_architecture(cards), cpu_name=None, cpu_features=()
    )
    return host.evolve(
        ram_total_bytes=ram_bytes,
        ram_available_bytes=ram_bytes * 31 // 32,
        shm_bytes=ram_bytes // 2,
        gpus=gpus,
        links=links,
        notes=(
            "A typical machine with these cards, not a reading of this host",
            *other_meanings(terms),
            *gpu_notes,
            *link_notes,
            *host_notes,
        ),
    )


def _composed_gpus(
    name: str, cards: Sequence[Card], machines: Sequence[Hardware]
) -> tuple[tuple[Gpu, ...], list[str]]:
    """The GPUs of a machine of this name, as known machines have them, and notes on estimates."""
    known_gpus = {gpu_key(gpu): gpu for machine in machines for gpu in machine.gpus}
    gpus = tuple(
        (known_gpus.get(card_key(card)) or build_gpu(card)).evolve(
            index=index, uuid=f"GPU-{uuid.uuid5(_NAMESPACE, f'{name}/{index}')}"
        )
        for index, card in enumerate(cards)
    )
    estimated_names = sorted(
        {card.name for card in cards if card.idle_mib is None and card_key(card) not in known_gpus}
    )
    if not estimated_names:
        return gpus, []
    return gpus, [
        f"free memory of {', '.join(estimated_names)} is an estimate: {1 - _DRIVER_SHARE:.0%} of"
        " all"
    ]


def gpu_key(gpu: Gpu) -> tuple[str, int | None]:
    """Name and memory in MiB, by which cards differ; shared memory differs by machine."""
    return gpu.name, None if gpu.memory_kind == "unified" else (gpu.total_bytes or 0) >> 20


def card_key(card: Card) -> tuple[str, int | None]:
    """The key of the GPUs of a card."""
    return card.name, card.memory_mib


def bridged_machine(machine: Hardware, terms: Sequence[Term]) -> Hardware:
    """The machine with a bridge of NVLink between its two cards, as its name says. A bridge joins
    two alike cards, so other machines get a note."""
    term = terms[0]
    if term.card.nvlinks and len(terms) == 1 and len(machine.gpus) == 2:
        links = tuple(
            link.evolve(nvlinks=term.card.nvlinks, p2p=True, p2p_status=None)
            for link in machine.links
        )
        return machine.evolve(links=links, notes=(*machine.notes, "links: NVLink, by the name"))
    note = f"{ASSUMED_CARD} cards without NVLink: a file of `fitserve probe --json` has the links"
    return machine.evolve(notes=(*machine.notes, note))


def _part_of(gpu: Gpu, part: SliceProfile | None) -> Gpu:
    """The part of a GPU as MIG shows it; without a part, the GPU."""
    if part is None:
        return gpu
    return gpu.evolve(
        name=f"{gpu.name} MIG {part.name}",
        uuid=f"MIG-{gpu.uuid.removeprefix('GPU-')}",
        total_bytes=part.bytes_of(gpu.total_bytes or 0),
        free_bytes=part.bytes_of(gpu.free_bytes or 0),
        mig=True,
    )


def _composed_links(
    cards: Sequence[Card], parts: Sequence[SliceProfile | None], machines: Sequence[Hardware]
) -> tuple[tuple[Link, ...], list[str]]:
    """The links between all cards, and a note on their source. parts: of the cards."""
    links = tuple(
        _link(first, second, machines).evolve(a=a, b=b)
        for (a, first), (b, second) in itertools.combinations(enumerate(cards), 2)
    )
    if not links:
        return (), []
    if any(parts):
        return tuple(link.evolve(nvlinks=0, p2p=False) for link in links), [
            "links: none between parts of cards"
        ]
    return links, ["links: as in the machines that fitserve knows with these cards, else unknown"]


def _composed_ram(similar_machine: Hardware | None, gpus: Sequence[Gpu]) -> tuple[int, list[str]]:
    """Bytes of RAM, and a note on their source. similar_machine: the most similar known one."""
    if similar_machine is not None and len(similar_machine.gpus) >= len(gpus):
        return similar_machine.ram_total_bytes, [
            "processor and RAM are those of the most similar machine that fitserve knows"
        ]
    gpu_bytes = sum(gpu.total_bytes or 0 for gpu in gpus)
    known_bytes = similar_machine.ram_total_bytes if similar_machine is not None else 0
    return max(_MIN_RAM_BYTES, gpu_bytes, known_bytes), [
        "RAM is an assumption: that of a known machine, or all memory of the GPUs"
    ]


def _architecture(cards: Iterable[Card]) -> str:
    """The processor's architecture."""
    return "aarch64" if any(card.is_joined for card in cards) else "x86_64"


def other_meanings(terms: Iterable[Term]) -> list[str]:
    """Notes on terms that other cards fit too, and on assumptions about the card."""
    return [
        f"{ASSUMED_CARD} {term.card.name}; other cards of this name: {', '.join(term.alternatives)}"
        for term in terms
        if term.alternatives
    ] + [f"{ASSUMED_CARD} {note}" for term in terms for note in term.notes]


def _similar_machine(cards: Sequence[Card], machines: Sequence[Hardware]) -> Hardware | None:
    """The smallest known machine with one of these cards that has as many, else the largest."""
    names = {card.name for card in cards}
    similar_machines = [
        machine for machine in machines if names & {gpu.name for gpu in machine.gpus}
    ]
    large_machines = [machine for machine in similar_machines if len(machine.gpus) >= len(cards)]
    return next(iter(large_machines), similar_machines[-1] if similar_machines else None)


def build_gpu(card: Card, lanes: int | None = None) -> Gpu:
    """A GPU of this card without a place in a machine. lanes: of PCIe, where the slot has fewer
    than the card."""
    if card.pcie_lanes is not None:
        lanes = min(lanes or card.pcie_lanes, card.pcie_lanes)
    total = (card.memory_mib or 0) << 20
    idle = card.idle_mib << 20 if card.idle_mib else int(total * (1 - _DRIVER_SHARE))
    return Gpu(
        index=0,
        uuid="",
        name=card.name,
        capability=card.capability,
        total_bytes=total,
        free_bytes=idle,
        pcie=Pcie(
            generation=card.pcie_generation,
            width=lanes,
            max_generation=card.pcie_generation,
            max_width=lanes,
        ),
        processes=(),
    )


def _link(first: Card, second: Card, machines: Sequence[Hardware]) -> Link:
    """How two cards reach each other, by the largest known machine that has both."""
    for machine in reversed(machines):
        names = [gpu.name for gpu in machine.gpus]
        for link in machine.links:
            if sorted((names[link.a], names[link.b])) == sorted((first.name, second.name)):
                return link
    if first.name == second.name and first.is_switched:
        return Link(a=0, b=0, nvlinks=first.nvlinks, p2p=True)
    if any("GeForce" in card.name for card in (first, second)):
        # The driver refuses it between GeForce cards (github.com/NVIDIA/nccl-tests issue 287).
        return Link(a=0, b=0, nvlinks=0, p2p=False)
    return Link(a=0, b=0, nvlinks=0)
