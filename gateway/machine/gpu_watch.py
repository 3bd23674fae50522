"""Watches the GPUs: critical errors (Xids) that the driver reports, and cards that NVML no longer
reads.

A GPU that failed is in `lost` until NVML reads it healthy again: plans avoid it, engines on it are
failed and started elsewhere. What a number means is data (profiles/xids.yaml). Xids of applications
are only counted: the engine's own log tells their story.

One thread, because waiting for NVML's events blocks. While a GPU is lost it is touched for a moment
every two seconds only, since nobody can reset a GPU that another process holds.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from gateway.domain import Failure, Hardware, Value
from gateway.domain.hardware import XidTable
from gateway.logging import Logger
from gateway.machine.gpu_reading import GpuReading
from gateway.machine.gpu_reading import read as read_gpu
from gateway.machine.kept_gpus import VARIABLES, KeptGpus
from gateway.machine.nvml import Nvml, recovery_action, text_of
from gateway.machine.probe import probe

log = Logger("fitserve.gpus")

# Between two readings of all cards.
_POLL_S = 2.0
# A machine without GPUs may get a driver later.
_ABSENT_S = 30.0
# The longest wait for an event, and so for the thread's end.
_EVENT_MS = 500
# For a moment after an Xid the driver may still say that the card needs nothing.
_LEAST_S = 10.0


def kept_here(data: Path, wanted: str | None, ram_bytes: int | None) -> KeptGpus:
    """What the settings (`wanted`: FITSERVE_GPUS, `ram_bytes`: FITSERVE_RAM_BYTES) and the
    environment of this process say of the machine. Raises
    SettingsError."""
    if wanted is None and not any(name in os.environ for name in VARIABLES):
        return KeptGpus(ram_bytes=ram_bytes)
    return KeptGpus.of(probe(data), wanted, os.environ).evolve(ram_bytes=ram_bytes)


class GpuLoss(Value):
    """Why a GPU is not used. `since` is of the monotonic clock."""

    message: str
    since: float
    xid: int | None = None
    unread: bool = Field(False, description="NVML could not read it since")


class GpuWatch:
    """`hardware` is what the gateway plans with: what the probe reads, with the lost GPUs marked.
        Tests give another `nvml` or
    another probe. kept: the GPUs that may be used."""

    def __init__(
        self,
        nvml: Nvml | None = None,
        read: Callable[[Path], Hardware] | None = None,
        kept: KeptGpus | None = None,
    ) -> None:
        self.lost: Mapping[str, GpuLoss] = {}
        self.counts: Counter[tuple[str, int]] = Counter()
        self.readings: Mapping[str, GpuReading] = {}
        """By UUID, of the cards that could be read last."""
        self._nvml = nvml
        self._read = read or (lambda data: probe(data, nvml=nvml))
        self._kept = kept or KeptGpus()
        self._table = XidTable(source="", xids={})
        self._wake: Callable[[], object] = lambda: None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._numbers: dict[int, str] = {}  # NVML's number of a card -> its UUID
        self._cards: dict[
            str, tuple[str, ...]
        ] = {}  # of each card that was ever read, its UUID and those of its MIG devices

    def start(self, table: XidTable, wake: Callable[[], object]) -> None:
        """`wake` is called from the thread, whenever `lost` changes."""
        self._table, self._wake = table, wake
        self._thread = threading.Thread(target=self._run, name="gpuwatch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Blocks for at most half a second."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def hardware(self, data: Path) -> Hardware:
        """Blocks."""
        found = self._kept.mark(self._read(data))
        lost, counts = self.lost, dict(self.counts)
        gpus = tuple(
            gpu.evolve(lost=lost[gpu.uuid].message) if gpu.uuid in lost else gpu
            for gpu in found.gpus
        )
        here = {gpu.uuid for gpu in gpus}
        notes = [
            f"{uuid} is not used: {loss.message.rstrip('.')}"
            for uuid, loss in lost.items()
            if uuid not in here
        ]
        notes += [
            f"{uuid}: Xid {xid} ({self.meaning(xid)}) {number} time{'s' if number > 1 else ''}"
            " since the gateway started"
            for (uuid, xid), number in sorted(counts.items())
        ]
        return found.evolve(gpus=gpus, notes=(*found.notes, *notes))

    def lost_messages(self) -> list[str]:
        """For each lost GPU a sentence that says why it is not used."""
        return [
            f"{uuid} is not used: {loss.message.rstrip('.')}" for uuid, loss in self.lost.items()
        ]

    def failure(self, gpus: tuple[str, ...]) -> Failure | None:
        """The failure of an engine on these GPUs, if one of them is lost."""
        for uuid in gpus:
            if (loss := self.lost.get(uuid)) is not None:
                return Failure(
                    kind="gpu_lost",
                    phase="serving",
                    message=f"The GPU {uuid} failed: {loss.message}",
                    culprit={"uuid": uuid} | ({"xid": loss.xid} if loss.xid is not None else {}),
                    advice=(
                        "Reset it (`nvidia-smi --gpu-reset`) or reboot; until then nothing is"
                        " started on it."
                    ),
                    proves="nothing",
                )
        return None

    # --- in the thread ---

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                seen = self._session()
            except Exception:
                # A driver can answer anything; a watch that ended would never say that a GPU is
                # lost.
                log.exception("the GPUs could not be watched")
                seen = False
            self._stop.wait(0 if seen else _ABSENT_S)

    def _session(self) -> bool:
        """Watch until a GPU is lost, or for one look where one is; whether there are GPUs to watch
        at all."""
        nvml = self._nvml
        if nvml is None:
            import pynvml

            nvml = pynvml
        from pynvml import NVMLError

        try:
            nvml.nvmlInit()
        except NVMLError:
            return False
        events = None
        try:
            events = self._register(nvml)
            while self._cards and not self._stop.is_set():
                unclaimed_xid = self._take_events(nvml, events)
                self._read_cards(nvml, unclaimed_xid)
                if self.lost:
                    break
        finally:
            with suppress(NVMLError):  # a lost card may fail this too
                if events is not None:
                    nvml.nvmlEventSetFree(events)
                nvml.nvmlShutdown()
        return bool(self._cards)

    def _register(self, nvml: Nvml) -> Any | None:
        """A set that hears of the Xids of every card that is not lost; None where no card tells
        them."""
        import pynvml

        events, heard = None, False
        with suppress(pynvml.NVMLError):
            events = nvml.nvmlEventSetCreate()
        lost = {index for index, uuid in self._numbers.items() if uuid in self.lost}
        for uuid, handle in self._handles(nvml, but=lost):
            if uuid is None or events is None:
                continue
            with suppress(pynvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                heard = True
        if events is not None and not heard:
            with suppress(pynvml.NVMLError):
                nvml.nvmlEventSetFree(events)
            return None
        return events

    def _handles(self, nvml: Nvml, but: Collection[int] = ()) -> Iterator[tuple[str | None, Any]]:
        """UUID and handle of every card; None and the error for a card that cannot be read.
        Remembers the cards that it reads.

        but: numbers of cards that are not touched, since a handle keeps a card from being reset."""
        from pynvml import NVMLError

        for index in range(nvml.nvmlDeviceGetCount()):
            if index in but:
                continue
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = text_of(nvml.nvmlDeviceGetUUID(handle))
            except NVMLError as error:
                yield None, error
                continue
            self._cards[uuid] = (uuid, *_parts(nvml, handle))
            self._numbers[index] = uuid
            yield uuid, handle

    def _take_events(self, nvml: Nvml, events: Any | None) -> int | None:
        """Take Xids for a while, until one is fatal. Returns the number of an Xid whose card no
        longer gives its UUID."""
        import pynvml

        until = time.monotonic() + _POLL_S
        while events is not None and not self._stop.is_set() and time.monotonic() < until:
            try:
                event = nvml.nvmlEventSetWait_v2(events, _EVENT_MS)
            except pynvml.NVMLError_Timeout:
                continue
            except pynvml.NVMLError:
                break  # a lost card breaks the set; the next reading of all cards shows which card
            if event.eventType != pynvml.nvmlEventTypeXidCriticalError:
                continue
            number = int(event.eventData)
            try:
                uuid = text_of(nvml.nvmlDeviceGetUUID(event.device))
            except pynvml.NVMLError:
                return number
            self._on_xid(uuid, number)
            if uuid in self.lost:
                return None
        if not self.lost:
            self._stop.wait(max(0.0, until - time.monotonic()))
        return None

    def _on_xid(self, uuid: str, number: int) -> None:
        xid = self._table.xids.get(number)
        if xid is not None and xid.lost:
            self._lose(uuid, f"Xid {number} ({xid.means}).", xid=number)
            return
        self.counts[uuid, number] += 1
        log.warning("a GPU reported an error", gpu=uuid, xid=number, means=self.meaning(number))

    def _read_cards(self, nvml: Nvml, unclaimed_xid: int | None) -> None:
        """Read every card that is known. unclaimed_xid: an Xid without UUID; it belongs to the card
        that is newly lost."""
        from pynvml import NVMLError, NVMLError_GpuIsLost, NVMLError_ResetRequired

        present, errors = set[str](), list[Exception]()
        readings: dict[str, GpuReading] = {}
        known = set(self._cards)
        try:
            for uuid, handle in self._handles(nvml):
                if uuid is None:
                    errors.append(handle)
                    continue
                present.add(uuid)
                self._judge(uuid, *_health(nvml, handle))
                if uuid not in self.lost:
                    before = self.readings.get(uuid)
                    index = next(
                        number for number, known_uuid in self._numbers.items() if known_uuid == uuid
                    )
                    readings[uuid] = read_gpu(
                        nvml, handle, index, before.name if before is not None else None
                    )
        except NVMLError:
            return  # the driver is being unloaded or updated: keep the last state
        self.readings = readings
        unclear = [
            error
            for error in errors
            if not isinstance(error, NVMLError_GpuIsLost | NVMLError_ResetRequired)
        ]
        for uuid in sorted(known - present):
            if not unclear:
                xid = self._table.xids.get(unclaimed_xid) if unclaimed_xid is not None else None
                message = (
                    f"Xid {unclaimed_xid} ({xid.means})."
                    if xid
                    else f"{errors[0]}."
                    if errors
                    else "NVML no longer lists it."
                )
                self._lose(uuid, message, xid=unclaimed_xid, unread=True)

    def _judge(self, uuid: str, trouble: str | None, certain: bool) -> None:
        loss = self.lost.get(uuid)
        if trouble is not None:
            self._lose(uuid, trouble)
        elif loss is not None and (
            loss.unread or (certain and time.monotonic() - loss.since > _LEAST_S)
        ):
            self._change(
                {one: why for one, why in self.lost.items() if one not in self._cards[uuid]}
            )
            log.info("a GPU works again", gpu=uuid)

    def _lose(
        self, uuid: str, message: str, *, xid: int | None = None, unread: bool = False
    ) -> None:
        before = self.lost.get(uuid)
        if before is not None and (before.unread or not unread):
            return
        loss = GpuLoss(message=message, since=time.monotonic(), xid=xid, unread=unread)
        if before is not None:
            loss = before.evolve(unread=True)
        else:
            log.error("a GPU is lost", gpu=uuid, reason=message)
        self._change({**self.lost, **dict.fromkeys(self._cards.get(uuid, (uuid,)), loss)})

    def _change(self, lost: dict[str, GpuLoss]) -> None:
        self.lost = lost
        self._wake()

    def meaning(self, number: int) -> str:
        """Of an Xid."""
        return self._table.xids[number].means if number in self._table.xids else "not in our table"


def _health(nvml: Nvml, handle: Any) -> tuple[str | None, bool]:
    """What is wrong with the card, and whether the driver itself says that nothing is."""
    import pynvml

    try:
        nvml.nvmlDeviceGetMemoryInfo(handle)
    except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired) as error:
        return f"{error}.", True
    except pynvml.NVMLError:
        pass  # a card without memory of its own
    return recovery_action(nvml, handle)


def _parts(nvml: Nvml, handle: Any) -> list[str]:
    """UUIDs of the card's MIG devices."""
    from pynvml import NVMLError

    found: list[str] = []
    with suppress(NVMLError):
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return found
        for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(NVMLError):
                found.append(
                    text_of(
                        nvml.nvmlDeviceGetUUID(
                            nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
                        )
                    )
                )
    return found
