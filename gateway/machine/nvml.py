"""GPUs as NVML tells of them: cards, MIG devices, and the links between cards.

Contract: what NVML refuses is None and is noted once, in words; nothing but the caller's own mistake raises.
NVML is shut down again whatever happens.
"""
# ruff: noqa: N802  (the names are NVML's)

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from gateway.domain import Gpu, GpuProcess, Link, Pcie

T = TypeVar("T")
Bus = tuple[int, int, int]
MemoryReading = tuple[int | None, int | None, Literal["dedicated", "unified"]]
SWITCH, ELSEWHERE = "switch", "elsewhere"  # far ends of NVLink links that are not a card of this process
NO_DOMAIN = 0xFFFFFFFF  # in the address of a far end that a virtual machine does not see

P2P_READ, P2P_NVLINK = 0, 2  # not by pynvml's names: its NVML_P2P_CAPS_INDEX_READ is a tuple, by a stray comma
P2P_OK, P2P_UNKNOWN = 0, 6
P2P_REASONS = {
    1: "chipset not supported",
    2: "GPU not supported",
    3: "I/O hub topology not supported",
    4: "disabled by a driver registry key",
    5: "not supported",
    P2P_UNKNOWN: "unknown",
}

INIT_HINTS = {
    "NVMLError_LibraryNotFound": "If this machine has a GPU, install the NVIDIA driver; a container needs to be started "
    "with GPUs and the `utility` capability.",
    "NVMLError_DriverNotLoaded": "If this machine has a GPU, load the driver (`modprobe nvidia`) or reboot.",
    "NVMLError_NoPermission": "Let this user read and write /dev/nvidiactl and /dev/nvidia*.",
    "NVMLError_Unknown": "In a container: the host took its GPUs away (`systemctl daemon-reload` does so where systemd manages "
    "cgroups); make the container anew.",
    "NVMLError_LibRmVersionMismatch": "The driver was updated while the old one was loaded: reboot.",
}


# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION and its values (nvml.h, drivers from 565 on) that mean: no work until then.
RECOVERY_FIELD = 230
RECOVERY = {1: "a GPU reset", 2: "a reboot", 4: "a GPU reset", 6: "a reset of its bus", 7: "a reboot"}


class Nvml(Protocol):
    """The functions of pynvml that are called; all raise pynvml.NVMLError."""

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str | bytes: ...
    def nvmlSystemGetCudaDriverVersion(self) -> int: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str | bytes: ...
    def nvmlDeviceGetName(self, handle: Any) -> str | bytes: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...
    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Any) -> int: ...
    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any) -> int: ...
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int: ...
    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any) -> int: ...
    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any) -> list[Any]: ...
    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any) -> list[Any]: ...
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int: ...
    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int: ...
    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Any, link: int) -> Any: ...
    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, index: int) -> int: ...
    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[int]) -> Any: ...
    def nvmlEventSetCreate(self) -> Any: ...
    def nvmlDeviceRegisterEvents(self, handle: Any, types: int, events: Any) -> None: ...
    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any: ...
    def nvmlEventSetFree(self, events: Any) -> None: ...


class Notes:
    """Takes readings that may be refused, and keeps each refusal once."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}

    def add(self, line: str) -> None:
        self.lines[line] = None

    def read(self, what: str, call: Callable[..., T], *args: Any) -> T | None:
        from pynvml import NVMLError

        try:
            return call(*args)
        except (NVMLError, OSError) as error:
            self.add(f"{what}: {_words(error)}")
            return None


class Cards:
    """What NVML tells, after `read`. `host_memory` (total, available) is what a card without memory of its own uses."""

    def __init__(self, nvml: Nvml, notes: Notes, proc: Path, host_memory: tuple[int | None, int | None]) -> None:
        self.nvml, self.notes, self.proc, self.host_memory = nvml, notes, proc, host_memory
        self.driver: str | None = None
        self.cuda: str | None = None
        self.gpus: list[Gpu] = []
        self.links: list[Link] = []

    def read(self) -> None:
        from pynvml import NVMLError

        try:
            self.nvml.nvmlInit()
        except NVMLError as error:
            hint = INIT_HINTS.get(type(error).__name__, "`nvidia-smi` may say more.")
            self.notes.add(f"No GPU can be read: {_words(error)}. {hint}")
            return
        try:
            driver = self.notes.read("driver version", self.nvml.nvmlSystemGetDriverVersion)
            self.driver = _text(driver) if driver else None
            # Not the _v2 form: it asks libcuda, which a container with only the `utility` capability does not have.
            cuda = self.notes.read("CUDA version of the driver", self.nvml.nvmlSystemGetCudaDriverVersion)
            self.cuda = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None
            self._read_gpus()
        finally:
            with suppress(NVMLError):  # a lost card may fail this too, and nothing is left to release
                self.nvml.nvmlShutdown()

    def _read_gpus(self) -> None:
        count = self.notes.read("number of GPUs", self.nvml.nvmlDeviceGetCount)
        if count == 0:
            self.notes.add("No GPU: the driver shows none to this process. In a container, ask for them (`--gpus all`).")
        whole: list[tuple[int, Any]] = []
        mig_number = count or 0
        for index in range(count or 0):
            handle = self.notes.read(f"GPU {index} is left out", self.nvml.nvmlDeviceGetHandleByIndex, index)
            card = None if handle is None else self._gpu(index, handle)
            if not card:
                continue
            if not card.mig:
                self.gpus.append(card)
                whole.append((index, handle))
                continue
            parts = []
            for part_handle in self._mig_handles(index, handle):
                part = self._gpu(mig_number, part_handle, card)
                mig_number += 1
                if part:
                    parts.append(part)
            if parts:
                names = ", ".join(f"GPU {part.index}" for part in parts)
                self.notes.add(f"GPU {index} is in MIG mode: listed as its MIG devices, {names}")
            else:
                self.notes.add(f"GPU {index} is in MIG mode without a MIG device that can be read: no engine can use it")
            self.gpus += parts or [card]
        self._read_links(whole)

    def _gpu(self, index: int, handle: Any, parent: Gpu | None = None) -> Gpu | None:
        """A card, or with `parent` one of its MIG devices."""
        nvml, who = self.nvml, f"GPU {index}"

        def read(what: str, call: Callable[[Any], T]) -> T | None:
            return self.notes.read(f"{who}: {what}", call, handle)

        uuid = read("UUID", nvml.nvmlDeviceGetUUID)
        if not uuid:
            self.notes.add(f"{who} is left out: without a UUID it cannot be given to an engine")
            return None
        name = read("name", nvml.nvmlDeviceGetName)
        mig: bool | None
        if parent:
            mig, capability, pcie = True, parent.capability, parent.pcie
        else:
            mode = read("MIG", nvml.nvmlDeviceGetMigMode)
            version = read("compute capability", nvml.nvmlDeviceGetCudaComputeCapability)
            mig = bool(mode[0]) if mode else None
            capability = f"{version[0]}.{version[1]}" if version else None
            pcie = Pcie(
                generation=read("PCIe generation", nvml.nvmlDeviceGetCurrPcieLinkGeneration),
                width=read("PCIe width", nvml.nvmlDeviceGetCurrPcieLinkWidth),
                max_generation=read("highest PCIe generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration),
                max_width=read("highest PCIe width", nvml.nvmlDeviceGetMaxPcieLinkWidth),
            )
        total, free, kind = self._memory(who, handle, can_share=parent is None)
        return Gpu(
            index=index,
            uuid=_text(uuid),
            name=_text(name) if name else "unknown",
            capability=capability,
            total_bytes=total,
            free_bytes=free,
            memory_kind=kind,
            mig=mig,
            pcie=pcie,
            processes=self._processes(who, handle),
            lost=parent.lost if parent else recovery_action(self.nvml, handle)[0],
        )

    def _memory(self, who: str, handle: Any, *, can_share: bool) -> MemoryReading:
        """Total and free bytes. Both forms unsupported, or zero bytes, is how a card without memory of its own answers."""
        from pynvml import NVMLError, NVMLError_NotSupported, nvmlMemory_v2

        refusal: Exception | None = None
        for version in (nvmlMemory_v2, None):
            try:
                memory = self.nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
            except NVMLError as error:
                refusal = error
                continue
            if memory.total:
                return memory.total, memory.free, "dedicated"
        if can_share and (refusal is None or isinstance(refusal, NVMLError_NotSupported)):
            self.notes.add(f"{who}: memory: not told by NVML, so taken as unified with the host's, from /proc/meminfo")
            return *self.host_memory, "unified"
        self.notes.add(f"{who}: memory: {_words(refusal) if refusal else 'reported as zero'}")
        return None, None, "dedicated"

    def _processes(self, who: str, handle: Any) -> tuple[GpuProcess, ...] | None:
        compute = self.notes.read(f"{who}: processes", self.nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        graphics = self.notes.read(f"{who}: graphics processes", self.nvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle)
        if compute is None:
            return None
        used = {found.pid: found.usedGpuMemory for found in [*(graphics or []), *compute]}
        return tuple(GpuProcess(pid=pid, name=self._process_name(pid), used_bytes=used[pid]) for pid in sorted(used))

    def _process_name(self, pid: int) -> str | None:
        with suppress(OSError):  # it ended, or it runs in another PID namespace
            return (self.proc / str(pid) / "comm").read_text(errors="replace").strip()
        return None

    def _mig_handles(self, index: int, handle: Any) -> list[Any]:
        from pynvml import NVMLError, NVMLError_InvalidArgument, NVMLError_NotFound

        handles = []
        slots = self.notes.read(f"GPU {index}: number of MIG devices", self.nvml.nvmlDeviceGetMaxMigDeviceCount, handle)
        for slot in range(slots or 0):
            try:
                handles.append(self.nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot))
            except (NVMLError_NotFound, NVMLError_InvalidArgument):
                continue  # an empty slot
            except NVMLError as error:
                self.notes.add(f"GPU {index}: MIG devices: {_words(error)}")
        return handles

    def _read_links(self, cards: list[tuple[int, Any]]) -> None:
        if len(cards) < 2:
            return
        buses = {index: self.notes.read(f"GPU {index}: PCI address", self._bus, handle) for index, handle in cards}
        ends = {index: self._link_ends(index, handle, set(buses.values())) for index, handle in cards}
        for (a, handle_a), (b, handle_b) in combinations(cards, 2):
            who, status = f"GPU {a} and GPU {b}", self.nvml.nvmlDeviceGetP2PStatus
            nvlinks: int | None = None
            ends_a, ends_b, bus_b = ends[a], ends[b], buses[b]
            if ends_a is not None and ends_b is not None and bus_b is not None:
                nvlinks = ends_a[bus_b]
                switched = min(ends_a[SWITCH], ends_b[SWITCH])
                if switched:  # cards on switches need not be in one partition of them
                    reach = self.notes.read(f"{who}: NVLink", status, handle_a, handle_b, P2P_NVLINK)
                    if reach is None:
                        nvlinks = None
                    elif reach == P2P_OK:
                        nvlinks += switched
            p2p = self.notes.read(f"{who}: peer-to-peer", status, handle_a, handle_b, P2P_READ)
            self.links.append(
                Link(
                    a=a,
                    b=b,
                    nvlinks=nvlinks,
                    p2p=None if p2p in (None, P2P_UNKNOWN) else p2p == P2P_OK,
                    p2p_status=None if p2p in (None, P2P_OK) else P2P_REASONS.get(p2p, f"status {p2p}"),
                )
            )

    def _bus(self, handle: Any) -> Bus:
        return _address(self.nvml.nvmlDeviceGetPciInfo(handle))

    def _link_ends(self, index: int, handle: Any, cards: set[Bus | None]) -> Counter[Bus | str] | None:
        """How many active links go to each of `cards` (PCI addresses) and to switches; None when NVML does not tell."""
        import pynvml

        ends: Counter[Bus | str] = Counter()
        refusal: Exception | None = None
        answered = False
        try:
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                try:
                    active = self.nvml.nvmlDeviceGetNvLinkState(handle, link)
                except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument) as error:
                    refusal = refusal or error  # a number past the card's last link
                    continue
                answered = True
                if active:
                    ends[self._far_end(handle, link, cards)] += 1
        except pynvml.NVMLError as error:
            refusal, answered = error, False
        if not answered:
            self.notes.add(f"GPU {index}: NVLink: {_words(refusal)}")
            return None
        return ends

    def _far_end(self, handle: Any, link: int, cards: set[Bus | None]) -> Bus | str:
        import pynvml

        refusal, bus = None, None
        try:
            bus = _address(self.nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
        except pynvml.NVMLError as error:
            refusal = error
        if bus in cards and bus:
            return bus
        kind = self.nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
        if kind in (pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN):
            return SWITCH  # unknown: a switch that a virtual machine does not see; whether it joins two cards is asked apart
        if bus is None or bus[0] == NO_DOMAIN:  # a card, and it may be one of ours
            raise refusal or pynvml.NVMLError_NotFound()
        return ELSEWHERE


def recovery_action(nvml: Nvml, handle: Any) -> tuple[str | None, bool]:
    """What the card needs before it can work again, in words, and whether the driver told at all."""
    import pynvml

    try:
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_FIELD])
    except pynvml.NVMLError:
        return None, False
    if field.nvmlReturn != pynvml.NVML_SUCCESS:
        return None, False
    action = RECOVERY.get(int(field.value.uiVal))
    return (f"The driver says that it needs {action}.", True) if action else (None, True)


def _address(pci: Any) -> Bus:
    return pci.domain, pci.bus, pci.device


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _words(error: Exception | None) -> str:
    """The error as it goes on after a colon: "not supported", "GPU is lost"."""
    text = (error.strerror or "") if isinstance(error, OSError) else str(error)
    return " ".join(word.lower() if word.istitle() else word for word in text.rstrip(".").split())
