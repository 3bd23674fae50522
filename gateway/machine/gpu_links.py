"""The links between GPUs as NVML reports them: active NVLinks and peer-to-peer access."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

from gateway.domain import Link
from gateway.machine.nvml import Notes, Nvml, format_error

Bus = tuple[int, int, int]
# Far ends of NVLinks that are not a card of this process.
SWITCH = "switch"
REMOTE = "elsewhere"
# This value stands in the address of a far end that a virtual machine does not see.
NO_DOMAIN = 0xFFFFFFFF

# pynvml's own NVML_P2P_CAPS_INDEX_READ is a tuple, by a stray comma.
P2P_READ = 0
P2P_NVLINK = 2
P2P_OK = 0
P2P_UNKNOWN = 6
P2P_REASONS = {
    1: "chipset not supported",
    2: "GPU not supported",
    3: "I/O hub topology not supported",
    4: "disabled by a driver registry key",
    5: "not supported",
    P2P_UNKNOWN: "unknown",
}


class GpuLinks:
    """Reads the links of cards. Refused readings are noted in `notes`."""

    def __init__(self, nvml: Nvml, notes: Notes) -> None:
        self.nvml = nvml
        self.notes = notes

    def read(self, cards: list[tuple[int, Any]]) -> list[Link]:
        """The link of each pair of these cards (index, handle)."""
        if len(cards) < 2:
            return []
        links = []
        buses = {
            index: self.notes.read(f"GPU {index}: PCI address", self._bus, handle)
            for index, handle in cards
        }
        ends = {
            index: self._link_ends(index, handle, set(buses.values())) for index, handle in cards
        }
        for (a, handle_a), (b, handle_b) in combinations(cards, 2):
            pair = f"GPU {a} and GPU {b}"
            status = self.nvml.nvmlDeviceGetP2PStatus
            nvlinks: int | None = None
            ends_a = ends[a]
            ends_b = ends[b]
            bus_b = buses[b]
            if ends_a is not None and ends_b is not None and bus_b is not None:
                nvlinks = ends_a[bus_b]
                switched = min(ends_a[SWITCH], ends_b[SWITCH])
                if switched:  # cards on switches can be in different partitions
                    reach = self.notes.read(
                        f"{pair}: NVLink", status, handle_a, handle_b, P2P_NVLINK
                    )
                    if reach is None:
                        nvlinks = None
                    elif reach == P2P_OK:
                        nvlinks += switched
            p2p = self.notes.read(f"{pair}: peer-to-peer", status, handle_a, handle_b, P2P_READ)
            links.append(
                Link(
                    a=a,
                    b=b,
                    nvlinks=nvlinks,
                    p2p=None if p2p in (None, P2P_UNKNOWN) else p2p == P2P_OK,
                    p2p_status=(
                        None if p2p in (None, P2P_OK) else P2P_REASONS.get(p2p, f"status {p2p}")
                    ),
                )
            )
        return links

    def _bus(self, handle: Any) -> Bus:
        return _bus_address(self.nvml.nvmlDeviceGetPciInfo(handle))

    def _link_ends(
        self, index: int, handle: Any, cards: set[Bus | None]
    ) -> Counter[Bus | str] | None:
        """The number of active links to each of `cards` (PCI addresses) and to switches.

        None if NVML does not report links.
        """
        import pynvml

        ends: Counter[Bus | str] = Counter()
        refusal: Exception | None = None
        has_answered = False
        try:
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                try:
                    active = self.nvml.nvmlDeviceGetNvLinkState(handle, link)
                except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument) as error:
                    refusal = refusal or error  # a number past the card's last link
                    continue
                has_answered = True
                if active:
                    ends[self._far_end(handle, link, cards)] += 1
        except pynvml.NVMLError as error:
            refusal = error
            has_answered = False
        if not has_answered:
            self.notes.add(f"GPU {index}: NVLink: {format_error(refusal)}")
            return None
        return ends

    def _far_end(self, handle: Any, link: int, cards: set[Bus | None]) -> Bus | str:
        import pynvml

        refusal = None
        bus = None
        try:
            bus = _bus_address(self.nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
        except pynvml.NVMLError as error:
            refusal = error
        if bus in cards and bus:
            return bus
        kind = self.nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
        if kind in (pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN):
            # Unknown: a switch that a virtual machine does not see. Another question shows whether
            # it connects two cards.
            return SWITCH
        if bus is None or bus[0] == NO_DOMAIN:  # a card, maybe of this process
            raise refusal or pynvml.NVMLError_NotFound()
        return REMOTE


def _bus_address(pci: Any) -> Bus:
    return pci.domain, pci.bus, pci.device
