"""RDMA of network interfaces, as Linux reports it: a network card that reads the memory of other
machines.

Source: Documentation/ABI/stable/sysfs-class-infiniband of Linux 6.12.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from gateway.domain import RdmaPort

_ACTIVE = "4:"
# NCCL has no transport for cards of another node type, such as those of iWARP.
_CHANNEL_ADAPTER = "1:"
_LAYERS: dict[str, Literal["infiniband", "roce"]] = {
    "InfiniBand": "infiniband",
    "Ethernet": "roce",
}
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")


def rdma_port(
    interface: str, system: Path = Path("/sys"), devices: Path = Path("/dev")
) -> RdmaPort | None:
    """The RDMA of an interface, of kind `none` where this user can use none; None: Linux does not
    say.

    system, devices: replace the folders of Linux.
    """
    cards = system / "class/net"
    if not (cards / interface).exists():
        return None
    # The ports of a bond, a bridge or a VLAN belong to the interfaces below it.
    names = {interface, *(path.name[6:] for path in (cards / interface).glob("lower_*"))}
    ports = [
        port
        for device in sorted((system / "class/infiniband").glob("*"))
        if _is_usable(device, devices)
        for port in _active_ports(device, cards, names)
    ]
    return max(ports, key=lambda port: port.bytes_s or 0.0, default=RdmaPort(kind="none"))


def _is_usable(device: Path, devices: Path) -> bool:
    """Whether engines of this user can open the device, and NCCL knows its kind."""
    if not _text(device / "node_type").startswith(_CHANNEL_ADAPTER):
        return False
    return any(
        os.access(devices / "infiniband" / path.name, os.R_OK | os.W_OK)
        for path in (device / "device/infiniband_verbs").glob("uverbs*")
    )


def _active_ports(device: Path, cards: Path, names: set[str]) -> Iterator[RdmaPort]:
    """The ports of a device that carry data for interfaces with these names."""
    # Linux counts the ports of an interface from 0, and those of a device from 1.
    numbers = {
        _text(cards / path.name / "dev_port") or "0"
        for path in (device / "device/net").glob("*")
        if path.name in names
    }
    for port in sorted((device / "ports").glob("*")):
        kind = _LAYERS.get(_text(port / "link_layer"))
        is_active = _text(port / "state").startswith(_ACTIVE)
        if kind is None or not is_active or str(int(port.name) - 1) not in numbers:
            continue
        rate = _RATE.match(_text(port / "rate"))
        yield RdmaPort(kind=kind, bytes_s=float(rate[1]) * 1e9 / 8 if rate else None)


def _text(path: Path) -> str:
    """The content of a file; empty: Linux gives none."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""
