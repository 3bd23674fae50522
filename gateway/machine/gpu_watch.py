"""The watch over GPUs: critical errors (Xids) of the driver, and cards that NVML cannot read.

A failed GPU is in `lost_cards` until NVML reads it healthy again. Plans avoid it, and engines on it
are failed and started on other GPUs. profiles/xids.yaml has the meaning of each number. Xids of
applications are only counted, because the engine's own log explains them.

A thread of its own waits for NVML's events. A lost GPU is touched only for a moment every two
seconds, because a GPU that another process holds cannot be reset.
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

from gateway.domain import Failure, Hardware, Value
from gateway.domain.base import Field
from gateway.domain.hardware import XidTable
from gateway.domain.units import plural
from gateway.logging import Logger
from gateway.machine.allowed_devices import VARIABLES, AllowedDevices
from gateway.machine.gpu_reading import GpuReading
from gateway.machine.gpu_reading import read as read_gpu
from gateway.machine.nvml import Nvml, decode_text, recovery_action
from gateway.machine.probe import probe
from gateway.settings import Settings

log = Logger("fitserve.gpus")

# Between two readings of all cards.
_POLL_S = 2.0
# A machine without GPUs may get a driver later.
_DRIVER_POLL_S = 30.0
# The longest wait for an event, and so for the end of the thread.
_EVENT_MS = 500
# For a moment after an Xid the driver may still report a healthy card.
_MIN_LOSS_S = 10.0


def allowed_devices(data: Path, settings: Settings | None) -> AllowedDevices:
    """The part of the machine that settings and environment allow. Raises SettingsError.

    settings: FITSERVE_GPUS, FITSERVE_RAM_BYTES and FITSERVE_HOST_BYTES; None: their defaults.
    """
    gpus = settings.gpus if settings is not None else None
    is_chosen = gpus is not None or any(name in os.environ for name in VARIABLES)
    allowed_devices = (
        AllowedDevices.choose_by_variables(probe(data), gpus, os.environ)
        if is_chosen
        else AllowedDevices()
    )
    if settings is None:
        return allowed_devices
    return allowed_devices.evolve(ram_bytes=settings.ram_bytes, host_bytes=settings.host_bytes)


class GpuLoss(Value):
    """The loss of a GPU. lost_at: by the monotonic clock."""

    message: str
    lost_at: float
    xid: int | None = None
    is_unread: bool = Field(False, description="NVML has not read it since", alias="unread")


class GpuWatch:
    """The watch. `hardware` is the probe's reading with lost GPUs marked, for the planner.

    nvml, read: replaced in tests.
    allowed_devices: the GPUs that may be used.
    """

    def __init__(
        self,
        nvml: Nvml | None = None,
        read: Callable[[Path], Hardware] | None = None,
        allowed_devices: AllowedDevices | None = None,
    ) -> None:
        self.lost_cards: Mapping[str, GpuLoss] = {}
        self.counts: Counter[tuple[str, int]] = Counter()
        self.readings: Mapping[str, GpuReading] = {}
        """The last readings by UUID, of the cards that could be read."""
        self._nvml = nvml
        self._read = read or (lambda data: probe(data, nvml=nvml))
        self._allowed_devices = allowed_devices or AllowedDevices()
        self._table = XidTable(source="", xids={})
        self._wake: Callable[[], object] = lambda: None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # NVML's number of a card -> its UUID.
        self._numbers: dict[int, str] = {}
        # UUID of a card -> the same and the UUIDs of its MIG devices, for all cards ever read.
        self._cards: dict[str, tuple[str, ...]] = {}

    def start(self, table: XidTable, wake: Callable[[], object]) -> None:
        """Start the thread. wake: called from it whenever `lost_cards` changes."""
        self._table = table
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name="gpuwatch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Blocks for at most half a second."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def hardware(self, data: Path) -> Hardware:
        """The machine for the planner. Blocks while the probe reads."""
        hardware = self._allowed_devices.mark(self._read(data))
        lost_cards = self.lost_cards
        counts = dict(self.counts)
        gpus = tuple(
            gpu.evolve(loss_reason=lost_cards[gpu.uuid].message) if gpu.uuid in lost_cards else gpu
            for gpu in hardware.gpus
        )
        present_uuids = {gpu.uuid for gpu in gpus}
        notes = [
            f"{uuid} is not used: {loss.message.rstrip('.')}"
            for uuid, loss in lost_cards.items()
            if uuid not in present_uuids
        ]
        notes += [
            f"{uuid}: Xid {xid} ({self.meaning(xid)}) {plural(number, 'time')}"
            " since the gateway started"
            for (uuid, xid), number in sorted(counts.items())
        ]
        return hardware.evolve(gpus=gpus, notes=(*hardware.notes, *notes))

    def lost_messages(self) -> list[str]:
        """A sentence for each lost GPU."""
        return [
            f"{uuid} is not used: {loss.message.rstrip('.')}"
            for uuid, loss in self.lost_cards.items()
        ]

    def failure(self, gpus: tuple[str, ...]) -> Failure | None:
        """The failure of an engine on these GPUs, if one of them is lost."""
        for uuid in gpus:
            if (loss := self.lost_cards.get(uuid)) is not None:
                return Failure(
                    kind="gpu_lost",
                    phase="serving",
                    message=f"The GPU {uuid} failed: {loss.message}",
                    culprit={"uuid": uuid} | ({"xid": loss.xid} if loss.xid is not None else {}),
                    advice=(
                        "Reset it (`nvidia-smi --gpu-reset`) or reboot. Until then no engine starts"
                        " on it."
                    ),
                    proven_subject="nothing",
                )
        return None

    # --- in the thread ---

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                has_gpus = self._session()
            except Exception:
                # The thread must survive every answer of a driver, else a lost GPU stays unnoticed.
                log.exception("the GPUs could not be watched")
                has_gpus = False
            self._stop.wait(0 if has_gpus else _DRIVER_POLL_S)

    def _session(self) -> bool:
        """Watch until a GPU is lost; with a lost GPU for one reading. Returns whether there are
        GPUs."""
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
                unclaimed_xid = self._read_events(nvml, events)
                self._read_cards(nvml, unclaimed_xid)
                if self.lost_cards:
                    break
        finally:
            with suppress(NVMLError):  # also fails for a lost card
                if events is not None:
                    nvml.nvmlEventSetFree(events)
                nvml.nvmlShutdown()
        return bool(self._cards)

    def _register(self, nvml: Nvml) -> Any | None:
        """A set of events for the Xids of all cards that are not lost; None: no card reports."""
        import pynvml

        events = None
        has_cards = False
        with suppress(pynvml.NVMLError):
            events = nvml.nvmlEventSetCreate()
        lost_indexes = {index for index, uuid in self._numbers.items() if uuid in self.lost_cards}
        for uuid, handle in self._handles(nvml, skip=lost_indexes):
            if uuid is None or events is None:
                continue
            with suppress(pynvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                has_cards = True
        if events is not None and not has_cards:
            with suppress(pynvml.NVMLError):
                nvml.nvmlEventSetFree(events)
            return None
        return events

    def _handles(self, nvml: Nvml, skip: Collection[int] = ()) -> Iterator[tuple[str | None, Any]]:
        """UUID and handle of every card; None and the error for a card that cannot be read.

        Remembers the cards. skip: numbers of cards that are not touched, as an open handle prevents
        a reset.
        """
        from pynvml import NVMLError

        for index in range(nvml.nvmlDeviceGetCount()):
            if index in skip:
                continue
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = decode_text(nvml.nvmlDeviceGetUUID(handle))
            except NVMLError as error:
                yield None, error
                continue
            self._cards[uuid] = (uuid, *_mig_uuids(nvml, handle))
            self._numbers[index] = uuid
            yield uuid, handle

    def _read_events(self, nvml: Nvml, events: Any | None) -> int | None:
        """Take Xids for a while, until one is fatal.

        Returns the number of an Xid whose card no longer gives its UUID.
        """
        import pynvml

        deadline = time.monotonic() + _POLL_S
        while events is not None and not self._stop.is_set() and time.monotonic() < deadline:
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
                uuid = decode_text(nvml.nvmlDeviceGetUUID(event.device))
            except pynvml.NVMLError:
                return number
            self._record_xid(uuid, number)
            if uuid in self.lost_cards:
                return None
        if not self.lost_cards:
            self._stop.wait(max(0.0, deadline - time.monotonic()))
        return None

    def _record_xid(self, uuid: str, number: int) -> None:
        xid = self._table.xids.get(number)
        if xid is not None and xid.loses_gpu:
            self._lose_card(uuid, f"Xid {number} ({xid.meaning}).", xid=number)
            return
        self.counts[uuid, number] += 1
        log.warning("a GPU reported an error", gpu=uuid, xid=number, means=self.meaning(number))

    def _read_cards(self, nvml: Nvml, unclaimed_xid: int | None) -> None:
        """Read every known card.

        unclaimed_xid: an Xid without UUID, of the card that is now lost.
        """
        from pynvml import NVMLError, NVMLError_GpuIsLost, NVMLError_ResetRequired

        present_uuids = set[str]()
        errors = list[Exception]()
        readings: dict[str, GpuReading] = {}
        expected_uuids = set(self._cards)
        try:
            for uuid, handle in self._handles(nvml):
                if uuid is None:
                    errors.append(handle)
                    continue
                present_uuids.add(uuid)
                self._judge_trouble(uuid, *_health(nvml, handle))
                if uuid not in self.lost_cards:
                    last = self.readings.get(uuid)
                    index = next(number for number, card in self._numbers.items() if card == uuid)
                    name = last.name if last is not None else None
                    readings[uuid] = read_gpu(nvml, handle, index, name)
        except NVMLError:
            return  # The driver is being unloaded or updated: keep the last state.
        self.readings = readings
        unclear = [
            error
            for error in errors
            if not isinstance(error, NVMLError_GpuIsLost | NVMLError_ResetRequired)
        ]
        for uuid in sorted(expected_uuids - present_uuids):
            if not unclear:
                xid = self._table.xids.get(unclaimed_xid) if unclaimed_xid is not None else None
                message = f"{errors[0]}." if errors else "NVML no longer lists it."
                if xid:
                    message = f"Xid {unclaimed_xid} ({xid.meaning})."
                self._lose_card(uuid, message, xid=unclaimed_xid, is_unread=True)

    def _judge_trouble(self, uuid: str, trouble: str | None, is_certain: bool) -> None:
        loss = self.lost_cards.get(uuid)
        if trouble is not None:
            self._lose_card(uuid, trouble)
        elif loss is not None and (
            loss.is_unread or (is_certain and time.monotonic() - loss.lost_at > _MIN_LOSS_S)
        ):
            self._record_changes(
                {
                    card: former_loss
                    for card, former_loss in self.lost_cards.items()
                    if card not in self._cards[uuid]
                }
            )
            log.info("a GPU works again", gpu=uuid)

    def _lose_card(
        self, uuid: str, message: str, *, xid: int | None = None, is_unread: bool = False
    ) -> None:
        former_loss = self.lost_cards.get(uuid)
        if former_loss is not None and (former_loss.is_unread or not is_unread):
            return
        loss = GpuLoss(message=message, lost_at=time.monotonic(), xid=xid, is_unread=is_unread)
        if former_loss is not None:
            loss = former_loss.evolve(is_unread=True)
        else:
            log.error("a GPU is lost", gpu=uuid, reason=message)
        self._record_changes(
            {**self.lost_cards, **dict.fromkeys(self._cards.get(uuid, (uuid,)), loss)}
        )

    def _record_changes(self, lost_cards: dict[str, GpuLoss]) -> None:
        self.lost_cards = lost_cards
        self._wake()

    def meaning(self, number: int) -> str:
        """The meaning of an Xid."""
        return (
            self._table.xids[number].meaning if number in self._table.xids else "not in our table"
        )


def _health(nvml: Nvml, handle: Any) -> tuple[str | None, bool]:
    """The trouble of a card, and whether the driver reported its state at all."""
    import pynvml

    try:
        nvml.nvmlDeviceGetMemoryInfo(handle)
    except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired) as error:
        return f"{error}.", True
    except pynvml.NVMLError:
        pass  # a card without its own memory
    return recovery_action(nvml, handle)


def _mig_uuids(nvml: Nvml, handle: Any) -> list[str]:
    """UUIDs of the card's MIG devices."""
    from pynvml import NVMLError

    uuids: list[str] = []
    with suppress(NVMLError):
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return uuids
        for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(NVMLError):
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
                uuids.append(decode_text(nvml.nvmlDeviceGetUUID(part)))
    return uuids
