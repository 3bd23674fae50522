"""NVML with scripted cards: pynvml's functions and its own error classes, without a driver.

A function named in `failing_calls` answers "Not Supported", as on a card that lacks the reading.
"""

# ruff: noqa: N802  (the names are NVML's)

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 1024**2
SWITCH = "switch"
VM_SWITCH = "switch seen from a virtual machine"  # its address is all ones
UNKNOWN = "unknown"  # neither address nor kind
HIDDEN_CARD = "hidden card"  # a card that this process was not given
VM_CARD = "card seen from a virtual machine"  # its address is all ones


@dataclass
class Card:
    """`links` names the far end of each NVLink link: a card's number, a switch, or None for an
    inactive link."""

    uuid: str | bytes
    name: str | bytes
    capability: tuple[int, int] = (8, 6)
    total: int | None = 24576 * MIB
    free: int = 24257 * MIB
    mig: bool | None = None
    mig_devices: list[Card | None] = field(default_factory=list)
    pcie: tuple[int, int, int, int] = (4, 16, 4, 16)
    links: list[int | str | None] | None = None
    compute: dict[int, int | None] = field(default_factory=dict)
    graphics: dict[int, int | None] = field(default_factory=dict)
    error: int | None = None
    unsupported: frozenset[str] = frozenset()
    recovery: int | None = None
    """The driver's own reserve in bytes; None: an old driver without this reading."""
    persistence: bool | None = True
    display: bool | None = False
    ecc: bool | None = None
    uncorrected: int = 0
    remapping: bool | None = None
    use: int | None = 0
    temperature: int | None = 40
    power: int | None = 60_000
    """In milliwatts, as NVML has it; `power_limit` too."""
    power_limit: int | None = 350_000
    throttles: int = 0
    """nvmlClocksThrottleReason bits."""


class FakeNvml:
    def __init__(
        self,
        cards: list[Card],
        *,
        init_error: int | None = None,
        p2p: int = 0,
        p2p_nvlink: int = 0,
        failing_calls: frozenset[str] = frozenset(),
        driver: str | bytes = "580.95.05",
    ) -> None:
        self.cards = cards
        self.init_error = init_error
        self.p2p = {0: p2p, 2: p2p_nvlink}
        self.failing_calls = failing_calls
        self.driver = driver
        self.open = 0  # inits less shutdowns
        self.inits = 0
        self.counts = 0  # how often the cards were counted, which begins every reading of all
        self.events: queue.Queue[tuple[Card, int]] = queue.Queue()
        self.registered: list[Card] = []

    def _note_call(self, function: str, card: Card | None = None) -> None:
        if not self.open:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if function in self.failing_calls or (card and function in card.unsupported):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        if "nvmlInit" in self.failing_calls:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.open += 1
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1
        if "nvmlShutdown" in self.failing_calls:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        self._note_call("nvmlSystemGetDriverVersion")
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        self._note_call("nvmlSystemGetCudaDriverVersion")
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        self._note_call("nvmlDeviceGetCount")
        self.counts += 1
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        self._note_call("nvmlDeviceGetHandleByIndex")
        card = self.cards[index]
        if card.error is not None:
            raise pynvml.NVMLError(card.error)
        return card

    def nvmlDeviceGetUUID(self, handle: Card) -> str | bytes:
        self._note_call("nvmlDeviceGetUUID", handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Card) -> str | bytes:
        self._note_call("nvmlDeviceGetName", handle)
        return handle.name

    def nvmlDeviceGetCudaComputeCapability(self, handle: Card) -> tuple[int, int]:
        self._note_call("nvmlDeviceGetCudaComputeCapability", handle)
        return handle.capability

    def nvmlDeviceGetMemoryInfo(self, handle: Card, version: int | None = None) -> Any:
        self._note_call(
            (
                "nvmlDeviceGetMemoryInfo_v2"
                if version == pynvml.nvmlMemory_v2
                else "nvmlDeviceGetMemoryInfo"
            ),
            handle,
        )
        if handle.total is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(
            total=handle.total, free=handle.free, used=handle.total - handle.free
        )

    def nvmlDeviceGetMigMode(self, handle: Card) -> list[int]:
        self._note_call("nvmlDeviceGetMigMode", handle)
        if handle.mig is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(handle.mig), int(handle.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Card) -> int:
        self._note_call("nvmlDeviceGetMaxMigDeviceCount", handle)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Card, index: int) -> Card:
        self._note_call("nvmlDeviceGetMigDeviceHandleByIndex", handle)
        device = handle.mig_devices[index] if index < len(handle.mig_devices) else None
        if device is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return device

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Card) -> int:
        self._note_call("nvmlDeviceGetCurrPcieLinkGeneration", handle)
        return handle.pcie[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Card) -> int:
        self._note_call("nvmlDeviceGetCurrPcieLinkWidth", handle)
        return handle.pcie[1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Card) -> int:
        self._note_call("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        return handle.pcie[2]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Card) -> int:
        self._note_call("nvmlDeviceGetMaxPcieLinkWidth", handle)
        return handle.pcie[3]

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Card) -> list[Any]:
        self._note_call("nvmlDeviceGetComputeRunningProcesses_v3", handle)
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=byte_count)
            for pid, byte_count in handle.compute.items()
        ]

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Card) -> list[Any]:
        self._note_call("nvmlDeviceGetGraphicsRunningProcesses_v3", handle)
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=byte_count)
            for pid, byte_count in handle.graphics.items()
        ]

    def nvmlDeviceGetPciInfo(self, handle: Card) -> Any:
        self._note_call("nvmlDeviceGetPciInfo", handle)
        return SimpleNamespace(domain=0, bus=self.cards.index(handle) + 1, device=0)

    def nvmlDeviceGetNvLinkState(self, handle: Card, link: int) -> int:
        self._note_call("nvmlDeviceGetNvLinkState", handle)
        if handle.links is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if link >= len(handle.links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(handle.links[link] is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Card, link: int) -> int:
        self._note_call("nvmlDeviceGetNvLinkRemoteDeviceType", handle)
        end = _end(handle, link)
        kinds: dict[int | str, int] = {
            SWITCH: pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH,
            VM_SWITCH: pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH,
            UNKNOWN: pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN,
        }
        kind: int = kinds.get(end, pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)
        return kind

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Card, link: int) -> Any:
        self._note_call("nvmlDeviceGetNvLinkRemotePciInfo", handle)
        end = _end(handle, link)
        if end in (VM_SWITCH, VM_CARD):
            return SimpleNamespace(domain=0xFFFFFFFF, bus=0xFF, device=0xFF)
        if end == UNKNOWN:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        bus = end + 1 if isinstance(end, int) else {SWITCH: 200, HIDDEN_CARD: 100}[end]
        return SimpleNamespace(domain=0, bus=bus, device=0)

    def nvmlDeviceGetP2PStatus(self, a: Card, b: Card, index: int) -> int:
        self._note_call("nvmlDeviceGetP2PStatus")
        return self.p2p[index]

    def nvmlDeviceGetFieldValues(self, handle: Card, fields: list[int]) -> Any:
        self._note_call("nvmlDeviceGetFieldValues", handle)
        lacks_recovery = handle.recovery is None
        code = pynvml.NVML_ERROR_NOT_SUPPORTED if lacks_recovery else pynvml.NVML_SUCCESS
        return [
            SimpleNamespace(
                fieldId=field, nvmlReturn=code, value=SimpleNamespace(uiVal=handle.recovery or 0)
            )
            for field in fields
        ]

    def _answer(self, function: str, handle: Card, value: Any) -> Any:
        self._note_call(function, handle)
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlDeviceGetPersistenceMode(self, handle: Card) -> int:
        return int(self._answer("nvmlDeviceGetPersistenceMode", handle, handle.persistence))

    def nvmlDeviceGetDisplayActive(self, handle: Card) -> int:
        return int(self._answer("nvmlDeviceGetDisplayActive", handle, handle.display))

    def nvmlDeviceGetEccMode(self, handle: Card) -> list[int]:
        mode = int(self._answer("nvmlDeviceGetEccMode", handle, handle.ecc))
        return [mode, mode]

    def nvmlDeviceGetTotalEccErrors(self, handle: Card, kind: int, counter: int) -> int:
        assert (kind, counter) == (
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        )
        return int(
            self._answer(
                "nvmlDeviceGetTotalEccErrors", handle, handle.uncorrected if handle.ecc else None
            )
        )

    def nvmlDeviceGetRemappedRows(self, handle: Card) -> Any:
        waiting = int(self._answer("nvmlDeviceGetRemappedRows", handle, handle.remapping))
        return 0, 0, waiting, 0

    def nvmlDeviceGetUtilizationRates(self, handle: Card) -> Any:
        return SimpleNamespace(
            gpu=self._answer("nvmlDeviceGetUtilizationRates", handle, handle.use), memory=0
        )

    def nvmlDeviceGetTemperature(self, handle: Card, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return int(self._answer("nvmlDeviceGetTemperature", handle, handle.temperature))

    def nvmlDeviceGetPowerUsage(self, handle: Card) -> int:
        return int(self._answer("nvmlDeviceGetPowerUsage", handle, handle.power))

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Card) -> int:
        return int(self._answer("nvmlDeviceGetEnforcedPowerLimit", handle, handle.power_limit))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Card) -> int:
        self._note_call("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return handle.throttles

    def nvmlEventSetCreate(self) -> Any:
        self._note_call("nvmlEventSetCreate")
        self.registered = []
        return self.registered

    def nvmlDeviceRegisterEvents(self, handle: Card, types: int, events: Any) -> None:
        self._note_call("nvmlDeviceRegisterEvents", handle)
        assert types == pynvml.nvmlEventTypeXidCriticalError
        events.append(handle)

    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any:
        self._note_call("nvmlEventSetWait_v2")
        try:
            card, xid = self.events.get(timeout=timeout_ms / 1000)
        except queue.Empty:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
        assert card in events
        return SimpleNamespace(
            device=card, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=xid
        )

    def nvmlEventSetFree(self, events: Any) -> None:
        self._note_call("nvmlEventSetFree")
        assert events is self.registered


def _end(card: Card, link: int) -> int | str:
    end = card.links[link] if card.links else None
    if end is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return end


FUNCTIONS = (
    *(name for name in vars(FakeNvml) if name.startswith("nvml")),
    "nvmlDeviceGetMemoryInfo_v2",
)


def two_3090() -> FakeNvml:
    """A desktop: x16 and x8 slots, no NVLink bridge, so all four links of each card are down."""
    uuids = ("GPU-30900000-0000-4000-8000-000000000000", "GPU-30900000-0000-4000-8000-000000000001")
    widths = (16, 8)
    cards = [
        Card(uuid, "NVIDIA GeForce RTX 3090", pcie=(4, width, 4, width), links=[None] * 4)
        for uuid, width in zip(uuids, widths, strict=True)
    ]
    return FakeNvml(cards, p2p=1, p2p_nvlink=5)


def h100(number: int, **changes: Any) -> Card:
    uuid = f"GPU-41000000-0000-4000-8000-{number:012}"
    options: dict[str, Any] = {"links": [SWITCH] * 18, "mig": False} | changes
    return Card(
        uuid,
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        81559 * MIB,
        81008 * MIB,
        pcie=(5, 16, 5, 16),
        **options,
    )


def eight_h100() -> FakeNvml:
    return FakeNvml([h100(number) for number in range(8)])


def gb10() -> FakeNvml:
    """DGX Spark: memory shared with the host, and nothing of PCIe, MIG or NVLink."""
    missing_functions = frozenset(
        name for name in FUNCTIONS if "Pcie" in name or "Mig" in name or "Memory" in name
    )
    return FakeNvml(
        [
            Card(
                "GPU-61000000-0000-4000-8000-000000000000",
                "NVIDIA GB10",
                (12, 1),
                None,
                unsupported=missing_functions,
            )
        ]
    )


def mig_h100() -> FakeNvml:
    """One card cut in two MIG devices (slots 0 and 2), and one whole card."""
    parts = [
        (
            Card(
                f"MIG-41000000-0000-5000-8000-{slot:012}",
                "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
                (0, 0),
                40320 * MIB,
                40000 * MIB,
            )
            if slot != 1
            else None
        )
        for slot in range(3)
    ]
    return FakeNvml([h100(0, mig=True, mig_devices=parts), h100(1)])
