"""GPUs as NVML reports them: cards and MIG devices.

Contract: a reading that NVML refuses is None and is noted once, in words. Only mistakes of the
caller raise. NVML is always shut down again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from gateway.domain import Gpu, GpuProcess, Link, Pcie
from gateway.machine.gpu_links import GpuLinks
from gateway.machine.nvml import Notes, Nvml, decode_text, format_error, recovery_action

T = TypeVar("T")
MemoryReading = tuple[int | None, int | None, Literal["dedicated", "unified"]]

INIT_HINTS = {
    "NVMLError_LibraryNotFound": (
        "If this machine has a GPU, install the NVIDIA driver; a container needs to be started "
        "with GPUs and the `utility` capability."
    ),
    "NVMLError_DriverNotLoaded": (
        "If this machine has a GPU, load the driver (`modprobe nvidia`) or reboot."
    ),
    "NVMLError_NoPermission": "Let this user read and write /dev/nvidiactl and /dev/nvidia*.",
    "NVMLError_Unknown": (
        "In a container: the host removed its GPUs (`systemctl daemon-reload` does so where"
        " systemd manages cgroups). Recreate the container."
    ),
    "NVMLError_LibRmVersionMismatch": (
        "The driver was updated while the old one was loaded: reboot."
    ),
}


class Cards:
    """The readings of NVML, after `read`.

    host_memory: (total, available), for cards without their own memory.
    """

    def __init__(
        self, nvml: Nvml, notes: Notes, proc: Path, host_memory: tuple[int | None, int | None]
    ) -> None:
        self.nvml = nvml
        self.notes = notes
        self.proc = proc
        self.host_memory = host_memory
        self.driver: str | None = None
        self.cuda: str | None = None
        self.gpus: list[Gpu] = []
        self.links: list[Link] = []

    def read(self) -> None:
        from pynvml import NVMLError

        try:
            self.nvml.nvmlInit()
        except NVMLError as error:
            hint = INIT_HINTS.get(type(error).__name__, "`nvidia-smi` may show more.")
            self.notes.add(f"No GPU can be read: {format_error(error)}. {hint}")
            return
        try:
            driver = self.notes.read("driver version", self.nvml.nvmlSystemGetDriverVersion)
            self.driver = decode_text(driver) if driver else None
            # The _v2 form needs libcuda, which a container with only the `utility` capability
            # lacks.
            cuda = self.notes.read(
                "CUDA version of the driver", self.nvml.nvmlSystemGetCudaDriverVersion
            )
            self.cuda = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None
            self._read_gpus()
        finally:
            with suppress(NVMLError):  # also fails for a lost card; nothing is left to release
                self.nvml.nvmlShutdown()

    def _read_gpus(self) -> None:
        """Read every GPU and MIG part, and note each reading that fails."""
        count = self.notes.read("number of GPUs", self.nvml.nvmlDeviceGetCount)
        if count == 0:
            self.notes.add(
                "No GPU: the driver shows none to this process. In a container, ask for them"
                " (`--gpus all`)."
            )
        whole_gpus: list[tuple[int, Any]] = []
        mig_number = count or 0
        for index in range(count or 0):
            handle = self.notes.read(
                f"GPU {index} is left out", self.nvml.nvmlDeviceGetHandleByIndex, index
            )
            card = None if handle is None else self._gpu(index, handle)
            if not card:
                continue
            if not card.mig:
                self.gpus.append(card)
                whole_gpus.append((index, handle))
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
                self.notes.add(
                    f"GPU {index} is in MIG mode without a MIG device that can be read: no engine"
                    " can use it"
                )
            self.gpus += parts or [card]
        self.links = GpuLinks(self.nvml, self.notes).read(whole_gpus)

    def _gpu(self, index: int, handle: Any, parent: Gpu | None = None) -> Gpu | None:
        """A card, or with `parent` one of its MIG devices."""
        nvml = self.nvml
        label = f"GPU {index}"

        def read(name: str, call: Callable[[Any], T]) -> T | None:
            return self.notes.read(f"{label}: {name}", call, handle)

        uuid = read("UUID", nvml.nvmlDeviceGetUUID)
        if not uuid:
            self.notes.add(f"{label} is left out: without a UUID no engine can use it")
            return None
        name = read("name", nvml.nvmlDeviceGetName)
        mig: bool | None
        if parent:
            mig = True
            capability = parent.capability
            pcie = parent.pcie
        else:
            mode = read("MIG", nvml.nvmlDeviceGetMigMode)
            version = read("compute capability", nvml.nvmlDeviceGetCudaComputeCapability)
            mig = bool(mode[0]) if mode else None
            capability = f"{version[0]}.{version[1]}" if version else None
            pcie = Pcie(
                generation=read("PCIe generation", nvml.nvmlDeviceGetCurrPcieLinkGeneration),
                width=read("PCIe width", nvml.nvmlDeviceGetCurrPcieLinkWidth),
                max_generation=read(
                    "highest PCIe generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration
                ),
                max_width=read("highest PCIe width", nvml.nvmlDeviceGetMaxPcieLinkWidth),
            )
        total, free_bytes, kind = self._read_memory(label, handle, can_share=parent is None)
        return Gpu(
            index=index,
            uuid=decode_text(uuid),
            name=decode_text(name) if name else "unknown",
            capability=capability,
            total_bytes=total,
            free_bytes=free_bytes,
            memory_kind=kind,
            mig=mig,
            pcie=pcie,
            processes=self._read_processes(label, handle),
            loss_reason=parent.loss_reason if parent else recovery_action(self.nvml, handle)[0],
        )

    def _read_memory(self, label: str, handle: Any, *, can_share: bool) -> MemoryReading:
        """Total and free bytes.

        A card without its own memory supports neither form, or reports zero bytes.
        """
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
            self.notes.add(
                f"{label}: memory: not reported by NVML, so taken as unified with the host's, from"
                " /proc/meminfo"
            )
            return *self.host_memory, "unified"
        self.notes.add(
            f"{label}: memory: {format_error(refusal) if refusal else 'reported as zero'}"
        )
        return None, None, "dedicated"

    def _read_processes(self, label: str, handle: Any) -> tuple[GpuProcess, ...] | None:
        compute = self.notes.read(
            f"{label}: processes", self.nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle
        )
        graphics = self.notes.read(
            f"{label}: graphics processes",
            self.nvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
            handle,
        )
        if compute is None:
            return None
        used_bytes = {
            process.pid: process.usedGpuMemory for process in [*(graphics or []), *compute]
        }
        return tuple(
            GpuProcess(pid=pid, name=self._process_name(pid), used_bytes=used_bytes[pid])
            for pid in sorted(used_bytes)
        )

    def _process_name(self, pid: int) -> str | None:
        with suppress(OSError):  # the process ended, or runs in another PID namespace
            return (self.proc / str(pid) / "comm").read_text(errors="replace").strip()
        return None

    def _mig_handles(self, index: int, handle: Any) -> list[Any]:
        from pynvml import NVMLError, NVMLError_InvalidArgument, NVMLError_NotFound

        handles = []
        slots = self.notes.read(
            f"GPU {index}: number of MIG devices", self.nvml.nvmlDeviceGetMaxMigDeviceCount, handle
        )
        for slot in range(slots or 0):
            try:
                handles.append(self.nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot))
            except (NVMLError_NotFound, NVMLError_InvalidArgument):
                continue  # an empty slot
            except NVMLError as error:
                self.notes.add(f"GPU {index}: MIG devices: {format_error(error)}")
        return handles
