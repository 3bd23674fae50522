"""GPUs that fail: meanings of Xids, the loss of a GPU, and its return. NVML is a fake; no GPU
failed for these tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from gateway.cli.doctor import examination as doctor
from gateway.machine.gpu_watch import GpuWatch
from gateway.machine.probe import probe
from gateway.profiles.profiles import Profiles
from tests.support.fake_nvml import FakeNvml, gb10, mig_h100, two_3090
from tests.support.patience import HANG_S, hang_s

TABLE = Profiles().xids


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.machine.gpu_watch._POLL_S", 0.02)
    monkeypatch.setattr("gateway.machine.gpu_watch._EVENT_MS", 5)
    monkeypatch.setattr("gateway.machine.gpu_watch._MIN_LOSS_S", 0.0)


@pytest.fixture
def watch() -> Iterator[Callable[[FakeNvml], GpuWatch]]:
    watches: list[GpuWatch] = []

    def start(nvml: FakeNvml) -> GpuWatch:
        gpu_watch = GpuWatch(nvml)
        watches.append(gpu_watch)
        gpu_watch.start(TABLE, lambda: None)
        until(lambda: len(nvml.registered) > 0 or not nvml.cards)
        return gpu_watch

    yield start
    for started_watch in watches:
        started_watch.close()


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + hang_s()
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.002)


def until_read_again(nvml: FakeNvml) -> None:
    """Every card has been read twice since: once could have been under way."""
    counts = nvml.counts
    until(lambda: nvml.counts > counts + 2)


def uuids(nvml: FakeNvml) -> list[str]:
    return [str(card.uuid) for card in nvml.cards]


@pytest.mark.parametrize(
    "number", [46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 158]
)
def test_fatal_xids_take_the_gpu_out_of_service(
    watch: Callable[[FakeNvml], GpuWatch], number: int
) -> None:
    nvml = two_3090()
    first, second = uuids(nvml)
    gpu_watch = watch(nvml)
    nvml.events.put((nvml.cards[1], number))
    until(lambda: second in gpu_watch.lost_cards)
    assert first not in gpu_watch.lost_cards
    failure = gpu_watch.failure((first, second))
    assert failure is not None
    assert (failure.kind, failure.culprit) == ("gpu_lost", {"uuid": second, "xid": number})
    assert f"Xid {number}" in failure.message
    assert gpu_watch.failure((first,)) is None
    hardware = gpu_watch.hardware(Path("/"))
    assert [gpu.loss_reason is not None for gpu in hardware.gpus] == [False, True]
    assert [gpu.uuid for gpu in hardware.usable().gpus] == [first]
    assert hardware.usable().links == ()


@pytest.mark.parametrize("number", [8, 13, 31, 32, 43, 44, 45, 63, 68, 69, 92, 94, 137, 154, 99999])
def test_other_xids_are_only_counted(watch: Callable[[FakeNvml], GpuWatch], number: int) -> None:
    nvml = two_3090()
    gpu_watch = watch(nvml)
    for _ in range(3):
        nvml.events.put((nvml.cards[0], number))
    until(lambda: gpu_watch.counts[str(nvml.cards[0].uuid), number] == 3)
    assert not gpu_watch.lost_cards
    assert any(
        f"Xid {number} (" in note and "3 times" in note
        for note in gpu_watch.hardware(Path("/")).notes
    )


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
def test_a_card_that_nvml_loses_is_lost_until_it_reads_it_again(
    watch: Callable[[FakeNvml], GpuWatch], error: int
) -> None:
    nvml = two_3090()
    gpu_watch = watch(nvml)
    nvml.cards[0].error = error
    until(lambda: uuids(nvml)[0] in gpu_watch.lost_cards)
    assert uuids(nvml)[1] not in gpu_watch.lost_cards
    hardware = gpu_watch.hardware(Path("/"))
    assert [gpu.uuid for gpu in hardware.gpus] == uuids(nvml)[1:]
    assert any(uuids(nvml)[0] in note and "not used" in note for note in hardware.notes)
    nvml.cards[0].error = None
    until(lambda: not gpu_watch.lost_cards)
    assert len(gpu_watch.hardware(Path("/")).usable().gpus) == 2


def test_other_errors_of_a_card_lose_nothing(watch: Callable[[FakeNvml], GpuWatch]) -> None:
    nvml = two_3090()
    gpu_watch = watch(nvml)
    nvml.cards[0].error = pynvml.NVML_ERROR_TIMEOUT
    until_read_again(nvml)
    assert not gpu_watch.lost_cards


def test_a_card_that_vanishes_is_lost(watch: Callable[[FakeNvml], GpuWatch]) -> None:
    nvml = two_3090()
    card = nvml.cards[1]
    gpu_watch = watch(nvml)
    nvml.cards = nvml.cards[:1]
    until(lambda: card.uuid in gpu_watch.lost_cards)
    assert "no longer lists it" in gpu_watch.lost_cards[str(card.uuid)].message


def test_an_xid_of_a_nameless_card_belongs_to_the_lost_card(
    watch: Callable[[FakeNvml], GpuWatch],
) -> None:
    nvml = two_3090()
    gpu_watch = watch(nvml)
    card = nvml.cards[1]
    card.unsupported = frozenset({"nvmlDeviceGetUUID"})
    card.error = pynvml.NVML_ERROR_GPU_IS_LOST
    nvml.events.put((card, 79))
    until(lambda: str(card.uuid) in gpu_watch.lost_cards)
    assert gpu_watch.lost_cards[str(card.uuid)].xid == 79


def test_a_drivers_advice_about_a_card_is_believed(
    watch: Callable[[FakeNvml], GpuWatch],
) -> None:
    nvml = two_3090()
    for card in nvml.cards:
        card.recovery = pynvml.NVML_GPU_RECOVERY_ACTION_NONE
    gpu_watch = watch(nvml)
    nvml.cards[0].recovery = pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET
    until(lambda: gpu_watch.lost_cards)
    assert "needs a GPU reset" in gpu_watch.lost_cards[uuids(nvml)[0]].message
    nvml.cards[0].recovery = pynvml.NVML_GPU_RECOVERY_ACTION_NONE
    until(lambda: not gpu_watch.lost_cards)
    # An Xid that the driver has recovered from by itself.
    nvml.events.put((nvml.cards[0], 119))
    until(lambda: not gpu_watch.lost_cards)


def test_an_old_driver_must_lose_the_card_once_before_it_counts_as_reset(
    watch: Callable[[FakeNvml], GpuWatch],
) -> None:
    nvml = two_3090()
    gpu_watch = watch(nvml)
    nvml.events.put((nvml.cards[0], 48))
    until(lambda: gpu_watch.lost_cards)
    until_read_again(nvml)
    assert gpu_watch.lost_cards
    nvml.cards[0].error = pynvml.NVML_ERROR_GPU_IS_LOST
    until(lambda: gpu_watch.lost_cards[uuids(nvml)[0]].is_unread)
    assert gpu_watch.lost_cards[uuids(nvml)[0]].xid == 48
    nvml.cards[0].error = None
    until(lambda: not gpu_watch.lost_cards)


def test_the_mig_devices_of_a_lost_card_are_lost_with_it(
    watch: Callable[[FakeNvml], GpuWatch],
) -> None:
    nvml = mig_h100()
    gpu_watch = watch(nvml)
    nvml.events.put((nvml.cards[0], 95))
    until(lambda: gpu_watch.lost_cards)
    parts = [gpu.uuid for gpu in gpu_watch.hardware(Path("/")).gpus if gpu.uuid.startswith("MIG-")]
    assert len(parts) == 2
    assert all(gpu_watch.failure((uuid,)) for uuid in parts)
    assert gpu_watch.failure((str(nvml.cards[1].uuid),)) is None


def test_a_lost_card_is_not_held_open_and_can_be_reset(
    watch: Callable[[FakeNvml], GpuWatch],
) -> None:
    nvml = two_3090()
    gpu_watch = watch(nvml)
    nvml.cards[0].error = pynvml.NVML_ERROR_GPU_IS_LOST
    until(lambda: gpu_watch.lost_cards)
    until(lambda: nvml.registered == nvml.cards[1:])
    sessions = nvml.inits
    until(lambda: nvml.inits > sessions + 3)
    # The other one is still listened to.
    nvml.events.put((nvml.cards[1], 95))
    until(lambda: uuids(nvml)[1] in gpu_watch.lost_cards)
    gpu_watch.close()
    assert nvml.open == 0


@pytest.mark.parametrize(
    "nvml", [FakeNvml([]), FakeNvml([], init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)]
)
def test_a_machine_without_gpus_is_left_alone(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close of the watch does not wait for its next look."""
    monkeypatch.setattr("gateway.machine.gpu_watch._DRIVER_POLL_S", 10 * HANG_S)
    gpu_watch = GpuWatch(nvml)
    gpu_watch.start(TABLE, lambda: None)
    closing = threading.Thread(target=gpu_watch.close, daemon=True)
    closing.start()
    closing.join(HANG_S)
    assert not closing.is_alive()
    assert not gpu_watch.lost_cards


def test_a_card_without_events_is_polled() -> None:
    nvml = gb10()
    nvml.failing_calls = frozenset({"nvmlEventSetCreate"})
    gpu_watch = GpuWatch(nvml)
    gpu_watch.start(TABLE, lambda: None)
    until_read_again(nvml)
    assert not gpu_watch.lost_cards
    nvml.cards[0].error = pynvml.NVML_ERROR_GPU_IS_LOST
    until(lambda: gpu_watch.lost_cards)
    gpu_watch.close()


def test_every_xid_has_a_meaning_and_an_action() -> None:
    assert TABLE.source.startswith("docs.nvidia.com/")
    for number, xid in TABLE.xids.items():
        asks = any(
            word in xid.action for word in ("RESET_GPU", "RESTART_BM", "reset or node reboot")
        )
        assert xid.loses_gpu == asks, number


def test_the_probe_alone_shows_the_drivers_advice_about_a_card() -> None:
    nvml = two_3090()
    nvml.cards[1].recovery = pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT
    assert [gpu.loss_reason for gpu in probe(nvml=nvml).gpus] == [
        None,
        "According to the driver it needs a reboot.",
    ]
    check = doctor._check_gpus(probe(nvml=nvml))
    assert (check.state, "GPU 1: According to the driver it needs a reboot." in check.finding) == (
        "warn",
        True,
    )


def test_the_doctor_warns_of_containers_that_can_lose_their_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = probe(nvml=two_3090())
    manager = "systemd"
    monkeypatch.setattr("gateway.cli.doctor.examination.cgroup_driver", lambda: manager)
    (warning,) = doctor._cgroups(hardware, has_docker=True, char_devices=tmp_path)
    assert warning.state == "warn"
    assert "daemon-reload" in warning.finding
    assert "nvidia-ctk" in warning.do
    (tmp_path / "195:0").symlink_to("/dev/nvidia0")
    assert doctor._cgroups(hardware, has_docker=True, char_devices=tmp_path)[0].state == "ok"
    (tmp_path / "195:0").unlink()
    manager = "cgroupfs"
    assert doctor._cgroups(hardware, has_docker=True, char_devices=tmp_path)[0].state == "ok"
    assert not doctor._cgroups(hardware, has_docker=False)
    assert not doctor._cgroups(hardware.evolve(gpus=()), has_docker=True)
