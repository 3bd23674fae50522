"""The probe against scripted NVML and scripted /proc: its readings, and the notes on missing
ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain import Hardware, Link
from gateway.machine.probe import probe
from tests.support.fake_nvml import (
    FUNCTIONS,
    HIDDEN_CARD,
    MIB,
    SWITCH,
    UNKNOWN,
    VM_CARD,
    VM_SWITCH,
    Card,
    FakeNvml,
    eight_h100,
    gb10,
    h100,
    mig_h100,
    two_3090,
)
from tests.support.paths import SNAPSHOTS

KIB = 1024
MEMINFO = (
    "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:   12000000"
    " kB\nHugePages_Total:       0\n"
)
X86_CPUINFO = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480C
flags\t\t: fpu sse2 avx avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8 hypervisor

processor\t: 1
model name\t: never read
"""
ARM_CPUINFO = (
    "processor\t: 0\nFeatures\t: fp asimd aes asimdhp sve2 bf16 i8mm\nCPU implementer\t: 0x41\n"
)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of an x86 host with 16 GB and no cgroup limits."""
    root = tmp_path / "proc"
    (root / "self").mkdir(parents=True)
    (root / "meminfo").write_text(MEMINFO)
    (root / "cpuinfo").write_text(X86_CPUINFO)
    return root


def no_gpu() -> FakeNvml:
    return FakeNvml([], init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def links(hardware: Hardware) -> list[tuple[int, int, int | None, bool | None, str | None]]:
    return [(link.a, link.b, link.nvlinks, link.p2p, link.p2p_status) for link in hardware.links]


# --- cards ---


def test_two_3090_have_no_nvlink_and_no_peer_to_peer() -> None:
    nvml = two_3090()
    hardware = probe(nvml=nvml)
    first, second = hardware.gpus
    assert (first.index, first.name, first.capability) == (0, "NVIDIA GeForce RTX 3090", "8.6")
    assert (first.total_bytes, first.memory_kind, first.mig) == (25769803776, "dedicated", None)
    assert (first.pcie.generation, first.pcie.width, second.pcie.width, second.pcie.max_width) == (
        4,
        16,
        8,
        8,
    )
    assert first.processes == ()
    assert links(hardware) == [(0, 1, 0, False, "chipset not supported")]
    assert (hardware.driver, hardware.cuda_driver) == ("580.95.05", "13.0")
    assert hardware.notes == ("GPU 0: MIG: not supported", "GPU 1: MIG: not supported")


def test_eight_h100_reach_each_other_over_18_links_of_the_switch() -> None:
    hardware = probe(nvml=eight_h100())
    assert len(hardware.gpus) == 8
    assert len(hardware.links) == 28
    assert {(link.nvlinks, link.p2p, link.p2p_status) for link in hardware.links} == {
        (18, True, None)
    }
    assert {gpu.mig for gpu in hardware.gpus} == {False}
    assert hardware.notes == ()


def test_links_of_a_bridge_are_counted_between_the_cards_they_join_only() -> None:
    cards = [
        Card("GPU-a", "A", links=[1, 1, 1, 1]),
        Card("GPU-b", "A", links=[0, 0, 0, 0]),
        Card("GPU-c", "A", links=[None, HIDDEN_CARD, HIDDEN_CARD, None]),
    ]
    assert [link.nvlinks for link in probe(nvml=FakeNvml(cards)).links] == [4, 0, 0]


@pytest.mark.parametrize("end", [VM_SWITCH, UNKNOWN])
def test_a_switch_hidden_by_a_virtual_machine_joins_cards_by_nvml(
    end: str,
) -> None:
    cards = [h100(0, links=[end] * 18), h100(1, links=[end] * 18)]
    assert links(probe(nvml=FakeNvml(cards))) == [(0, 1, 18, True, None)]


def test_cards_in_different_partitions_of_a_switch_have_no_link() -> None:
    cards = [h100(0, links=[SWITCH] * 18), h100(1, links=[SWITCH] * 18)]
    assert links(probe(nvml=FakeNvml(cards, p2p=5, p2p_nvlink=5))) == [
        (0, 1, 0, False, "not supported")
    ]


def test_a_card_without_nvlink_leaves_the_count_unknown() -> None:
    hardware = probe(
        nvml=FakeNvml([Card("GPU-a", "L4", mig=False), Card("GPU-b", "L4", mig=False)])
    )
    assert links(hardware) == [(0, 1, None, True, None)]
    assert hardware.notes == ("GPU 0: NVLink: not supported", "GPU 1: NVLink: not supported")


def test_a_card_at_the_far_end_without_an_address_leaves_the_count_unknown() -> None:
    hardware = probe(nvml=FakeNvml([h100(0, links=[VM_CARD] * 4), h100(1, links=[VM_CARD] * 4)]))
    assert links(hardware) == [(0, 1, None, True, None)]
    assert hardware.notes == ("GPU 0: NVLink: not found", "GPU 1: NVLink: not found")


@pytest.mark.parametrize(
    ("failing_call", "reading"),
    [("nvmlDeviceGetNvLinkRemotePciInfo", "NVLink"), ("nvmlDeviceGetPciInfo", "PCI address")],
)
def test_links_with_an_unreadable_far_end_leave_the_count_unknown(
    failing_call: str, reading: str
) -> None:
    cards = [Card("GPU-a", "A", links=[1] * 4), Card("GPU-b", "A", links=[0] * 4)]
    hardware = probe(nvml=FakeNvml(cards, failing_calls=frozenset({failing_call})))
    assert links(hardware) == [(0, 1, None, True, None)]
    assert {f"GPU 0: {reading}: not supported", f"GPU 1: {reading}: not supported"} <= set(
        hardware.notes
    )


def test_an_unknown_peer_to_peer_status_is_neither_yes_nor_no() -> None:
    cards = [Card("GPU-a", "A", links=[None]), Card("GPU-b", "A", links=[None])]
    assert probe(nvml=FakeNvml(cards, p2p=6)).links == (
        Link(a=0, b=1, nvlinks=0, p2p=None, p2p_status="unknown"),
    )


def test_a_card_that_shares_the_hosts_memory_is_read_from_meminfo(proc: Path) -> None:
    hardware = probe(nvml=gb10(), proc=proc)
    (gpu,) = hardware.gpus
    assert (gpu.memory_kind, gpu.total_bytes, gpu.free_bytes) == (
        "unified",
        16000000 * KIB,
        12000000 * KIB,
    )
    assert (gpu.capability, gpu.mig, gpu.pcie.width) == ("12.1", None, None)
    assert "GPU 0: PCIe width: not supported" in hardware.notes
    assert any("unified" in note for note in hardware.notes)
    assert len(hardware.notes) == len(set(hardware.notes))


def test_a_card_that_reports_zero_bytes_shares_the_hosts_memory(proc: Path) -> None:
    (gpu,) = probe(nvml=FakeNvml([Card("GPU-a", "Orin", total=0, free=0)]), proc=proc).gpus
    assert (gpu.memory_kind, gpu.total_bytes) == ("unified", 16000000 * KIB)


def test_an_old_driver_is_asked_for_the_old_form_of_memory() -> None:
    hardware = probe(
        nvml=FakeNvml(two_3090().cards, failing_calls=frozenset({"nvmlDeviceGetMemoryInfo_v2"}))
    )
    assert [(gpu.memory_kind, gpu.total_bytes) for gpu in hardware.gpus] == [
        ("dedicated", 24576 * MIB)
    ] * 2


def test_memory_that_fails_to_be_read_is_not_taken_for_unified() -> None:
    class Failing(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle: Card, version: int | None = None) -> object:  # noqa: N802
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    hardware = probe(nvml=Failing([h100(0)]))
    (gpu,) = hardware.gpus
    assert (gpu.memory_kind, gpu.total_bytes, gpu.free_bytes) == ("dedicated", None, None)
    assert hardware.notes == ("GPU 0: memory: GPU is lost",)


def test_a_lost_card_is_left_out_by_name_and_the_others_keep_their_numbers() -> None:
    nvml = FakeNvml([h100(0), h100(1, error=pynvml.NVML_ERROR_GPU_IS_LOST), h100(2)])
    hardware = probe(nvml=nvml)
    assert [gpu.index for gpu in hardware.gpus] == [0, 2]
    assert links(hardware) == [(0, 2, 18, True, None)]
    assert hardware.notes == ("GPU 1 is left out: GPU is lost",)
    assert nvml.open == 0


def test_a_card_in_mig_mode_is_listed_as_its_mig_devices() -> None:
    hardware = probe(nvml=mig_h100())
    assert [(gpu.index, gpu.uuid[:4], gpu.mig) for gpu in hardware.gpus] == [
        (2, "MIG-", True),
        (3, "MIG-", True),
        (1, "GPU-", False),
    ]
    part = hardware.gpus[0]
    assert (part.total_bytes, part.capability, part.pcie.max_width) == (40320 * MIB, "9.0", 16)
    assert hardware.links == ()
    assert hardware.notes == ("GPU 0 is in MIG mode: listed as its MIG devices, GPU 2, GPU 3",)


def test_a_card_in_mig_mode_without_devices_is_listed_itself() -> None:
    hardware = probe(nvml=FakeNvml([h100(0, mig=True)]))
    assert [(gpu.index, gpu.mig) for gpu in hardware.gpus] == [(0, True)]
    assert hardware.notes == (
        "GPU 0 is in MIG mode without a MIG device that can be read: no engine can use it",
    )


def test_a_card_without_a_uuid_is_left_out() -> None:
    hardware = probe(nvml=FakeNvml([h100(0)], failing_calls=frozenset({"nvmlDeviceGetUUID"})))
    assert hardware.gpus == ()
    assert hardware.notes[-1] == "GPU 0 is left out: without a UUID no engine can use it"


def test_processes_on_the_card_are_named_from_proc(proc: Path) -> None:
    (proc / "41").mkdir()
    (proc / "41" / "comm").write_text("VLLM::EngineCor\n")
    card = h100(0, compute={41: 5 * MIB, 99: None}, graphics={41: 7, 7: 8 * MIB})
    (gpu,) = probe(nvml=FakeNvml([card]), proc=proc).gpus
    assert gpu.processes is not None
    assert [(process.pid, process.name, process.used_bytes) for process in gpu.processes] == [
        (7, None, 8 * MIB),
        (41, "VLLM::EngineCor", 5 * MIB),
        (99, None, None),
    ]


def test_names_of_cards_may_be_bytes() -> None:
    hardware = probe(nvml=FakeNvml([Card(b"GPU-a", b"NVIDIA \xff")], driver=b"550.1"))
    assert (hardware.gpus[0].uuid, hardware.gpus[0].name, hardware.driver) == (
        "GPU-a",
        "NVIDIA \ufffd",
        "550.1",
    )


# --- no cards ---


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            "NVML shared library not found. If this machine has a GPU, install the NVIDIA driver",
        ),
        (
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            "driver not loaded. If this machine has a GPU, load the driver",
        ),
        (
            pynvml.NVML_ERROR_NO_PERMISSION,
            "insufficient permissions. Let this user read and write /dev/nvidiactl",
        ),
        (
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            "RM has detected an NVML/RM version mismatch. The driver was updated",
        ),
        (pynvml.NVML_ERROR_UNKNOWN, "unknown error. In a container: the host removed its GPUs"),
        (pynvml.NVML_ERROR_IRQ_ISSUE, "interrupt request issue. `nvidia-smi` may show more"),
    ],
)
def test_a_machine_without_nvml_is_a_cpu_only_host_with_the_reason(code: int, words: str) -> None:
    hardware = probe(nvml=FakeNvml([], init_error=code))
    assert hardware.gpus == ()
    assert hardware.driver is None
    assert hardware.cpu_cores >= 1
    assert hardware.notes[0].startswith(f"No GPU can be read: {words}")


def test_a_driver_that_shows_no_card_is_a_cpu_only_host() -> None:
    hardware = probe(nvml=FakeNvml([]))
    assert (hardware.gpus, hardware.driver) == ((), "580.95.05")
    assert hardware.notes[0].startswith("No GPU: the driver shows none")


def test_an_nvml_that_fails_to_shut_down_does_not_fail_the_probe() -> None:
    nvml = FakeNvml([h100(0)], failing_calls=frozenset({"nvmlShutdown"}))
    assert len(probe(nvml=nvml).gpus) == 1
    assert nvml.open == 0


def test_nvml_is_shut_down_when_reading_breaks() -> None:
    class Broken(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise RuntimeError("a bug")

    nvml = Broken([])
    with pytest.raises(RuntimeError, match="a bug"):
        probe(nvml=nvml)
    assert nvml.open == 0


@settings(deadline=None)
@given(
    make=st.sampled_from([two_3090, eight_h100, gb10, mig_h100]),
    failing_calls=st.frozensets(st.sampled_from(FUNCTIONS)),
)
def test_any_refused_readings_still_yield_a_hardware(
    make: Callable[[], FakeNvml], failing_calls: frozenset[str]
) -> None:
    nvml = make()
    nvml.failing_calls = failing_calls
    hardware = probe(nvml=nvml)
    assert Hardware.model_validate_json(hardware.model_dump_json()) == hardware
    assert (
        len({gpu.index for gpu in hardware.gpus})
        == len({gpu.uuid for gpu in hardware.gpus})
        == len(hardware.gpus)
    )
    assert nvml.open == 0
    for gpu in hardware.gpus:
        names = {
            note.split(": ")[1] for note in hardware.notes if note.startswith(f"GPU {gpu.index}: ")
        }
        assert gpu.processes is not None or "processes" in names
        if gpu.uuid.startswith("GPU-"):
            assert gpu.capability is not None or "compute capability" in names
            assert gpu.mig is not None or "MIG" in names
            assert gpu.pcie.width is not None or "PCIe width" in names
            assert gpu.memory_kind == "dedicated" or "memory" in names


# --- the host ---


def test_cpu_name_and_features_come_from_the_first_core(proc: Path) -> None:
    hardware = probe(nvml=no_gpu(), proc=proc)
    assert hardware.cpu_name == "Intel(R) Xeon(R) Platinum 8480C"
    assert hardware.cpu_features == (
        "avx2",
        "avx512f",
        "avx512_bf16",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
    )
    assert hardware.arch == os.uname().machine


def test_an_arm_cpu_has_features_and_its_missing_name_is_noted(proc: Path) -> None:
    (proc / "cpuinfo").write_text(ARM_CPUINFO)
    hardware = probe(nvml=no_gpu(), proc=proc)
    assert hardware.cpu_name is None
    assert hardware.cpu_features == ("asimd", "asimdhp", "i8mm", "bf16", "sve2")
    assert "CPU: name: not in /proc/cpuinfo" in hardware.notes


def test_ram_without_limits_is_the_hosts_and_cores_are_the_affinity(proc: Path) -> None:
    hardware = probe(nvml=no_gpu(), proc=proc)
    assert (hardware.ram_total_bytes, hardware.ram_available_bytes) == (
        16000000 * KIB,
        12000000 * KIB,
    )
    assert hardware.cpu_cores == len(os.sched_getaffinity(0))


def test_an_unreadable_proc_is_noted_and_counts_no_ram(tmp_path: Path) -> None:
    hardware = probe(nvml=no_gpu(), proc=tmp_path / "absent")
    assert (hardware.ram_total_bytes, hardware.ram_available_bytes, hardware.cpu_name) == (
        0,
        0,
        None,
    )
    assert {"RAM: no such file or directory", "CPU: no such file or directory"} <= set(
        hardware.notes
    )


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def cgroup_v2(proc: Path, *, path: str = "/app.slice/fitserve", root: str = "/") -> Path:
    """Mount a v2 hierarchy; the folder returned is this process's cgroup."""
    top = proc.parent / "cgroup"
    (proc / "self" / "cgroup").write_text(f"0::{path}\n")
    (proc / "self" / "mountinfo").write_text(
        f"20 1 0:19 / /proc rw - proc proc rw\n31 20 0:26 {root} {top} rw,nosuid shared:4 - cgroup2"
        " cgroup2 rw,nsdelegate\n"
    )
    folder = top / path.removeprefix(root).lstrip("/")
    folder.mkdir(parents=True)
    return folder


def cgroup_v1(proc: Path) -> Path:
    """Mount the cpu and memory controllers as Docker does; the folder returned holds both
    mounts."""
    top = proc.parent / "cgroup"
    (proc / "self" / "cgroup").write_text("5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n")
    (proc / "self" / "mountinfo").write_text(
        f"40 31 0:32 /docker/abc {top}/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        f"41 31 0:35 /docker/abc {top}/memory ro - cgroup cgroup rw,memory\n"
    )
    for controller in ("cpu,cpuacct", "memory"):
        (top / controller).mkdir(parents=True)
    return top


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 16), ("450000 100000", 4), ("50000 100000", 1), ("9900000 100000", 16)],
)
def test_a_v2_cpu_quota_bounds_the_cores(proc: Path, quota: str, cores: int) -> None:
    (cgroup_v2(proc) / "cpu.max").write_text(quota + "\n")
    assert probe(nvml=no_gpu(), proc=proc).cpu_cores == cores


@pytest.mark.usefixtures("sixteen_cores")
def test_a_quota_on_an_outer_cgroup_binds_too(proc: Path) -> None:
    inner = cgroup_v2(proc)
    (inner / "cpu.max").write_text("800000 100000\n")
    (inner.parent / "cpu.max").write_text("300000 100000\n")
    assert probe(nvml=no_gpu(), proc=proc).cpu_cores == 3


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(("quota", "cores"), [("-1", 16), ("250000", 2)])
def test_a_v1_cpu_quota_bounds_the_cores(proc: Path, quota: str, cores: int) -> None:
    top = cgroup_v1(proc)
    (top / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (top / "cpu,cpuacct" / "cpu.cfs_period_us").write_text("100000\n")
    assert probe(nvml=no_gpu(), proc=proc).cpu_cores == cores


def test_a_v2_memory_limit_bounds_ram_and_page_cache_counts_as_available(proc: Path) -> None:
    folder = cgroup_v2(proc)
    (folder / "memory.max").write_text(f"{4000 * MIB}\n")
    (folder / "memory.current").write_text(f"{1500 * MIB}\n")
    (folder / "memory.stat").write_text(
        f"anon 1\nfile {900 * MIB}\ninactive_file {500 * MIB}\nactive_file 7\n"
    )
    hardware = probe(nvml=no_gpu(), proc=proc)
    assert (hardware.ram_total_bytes, hardware.ram_available_bytes) == (4000 * MIB, 3000 * MIB)


def test_a_v2_cgroup_without_a_memory_limit_leaves_the_hosts_ram(proc: Path) -> None:
    folder = cgroup_v2(proc)
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text(f"{1500 * MIB}\n")
    assert probe(nvml=no_gpu(), proc=proc).ram_total_bytes == 16000000 * KIB


def test_a_v1_memory_limit_bounds_ram(proc: Path) -> None:
    memory = cgroup_v1(proc) / "memory"
    (memory / "memory.limit_in_bytes").write_text(f"{2000 * MIB}\n")
    (memory / "memory.usage_in_bytes").write_text(f"{600 * MIB}\n")
    (memory / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {100 * MIB}\n")
    hardware = probe(nvml=no_gpu(), proc=proc)
    assert (hardware.ram_total_bytes, hardware.ram_available_bytes) == (2000 * MIB, 1500 * MIB)


def test_a_cgroup_outside_the_mount_falls_back_to_the_mounts_own(proc: Path) -> None:
    cgroup_v2(proc, path="/", root="/")
    (proc / "self" / "cgroup").write_text("0::/../../elsewhere\n")
    (proc.parent / "cgroup" / "memory.max").write_text(f"{3000 * MIB}\n")
    (proc.parent / "memory.max").write_text("1\n")  # where the dots lead
    assert probe(nvml=no_gpu(), proc=proc).ram_total_bytes == 3000 * MIB


def test_unified_memory_is_the_hosts_even_under_a_cgroup_limit(proc: Path) -> None:
    (cgroup_v2(proc) / "memory.max").write_text(f"{1000 * MIB}\n")
    hardware = probe(nvml=gb10(), proc=proc)
    assert (hardware.ram_total_bytes, hardware.gpus[0].total_bytes) == (1000 * MIB, 16000000 * KIB)


def test_free_disk_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    hardware = probe(tmp_path / "not" / "yet", nvml=no_gpu())
    assert hardware.disk_free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert probe(nvml=no_gpu()).disk_free_bytes is None


def test_shared_memory_is_the_size_of_dev_shm() -> None:
    assert probe(nvml=no_gpu()).shm_bytes == shutil.disk_usage("/dev/shm").total


# --- as a whole ---


def test_the_real_nvml_of_this_machine_can_be_asked() -> None:
    hardware = probe()
    assert hardware.gpus or any(note.startswith("No GPU") for note in hardware.notes)


def test_a_cpu_only_host_is_read_without_starting_or_asking_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes milliseconds: files of the kernel, no program and no connection."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    for name in ("subprocess.Popen", "socket.socket", "time.sleep", "os.posix_spawn", "os.fork"):
        monkeypatch.setattr(name, never)
    assert probe(Path.cwd(), nvml=no_gpu()).cpu_cores >= 1


def test_importing_the_probe_does_not_import_pynvml() -> None:
    code = "import sys, gateway.machine.probe; sys.exit('pynvml' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, cwd=SNAPSHOTS.parent.parent
        ).returncode
        == 0
    )


@pytest.mark.parametrize("name", ["2x3090", "8xh100", "cpu"])
def test_a_snapshot_equals_the_output_of_the_command_line(name: str) -> None:
    text = (SNAPSHOTS / f"{name}.json").read_text()
    hardware = Hardware.model_validate_json(text)
    assert hardware.model_dump_json(indent=2) + "\n" == text
    assert hardware.notes[0].startswith("Snapshot of a typical machine")


@pytest.mark.parametrize(("name", "make"), [("2x3090", two_3090), ("8xh100", eight_h100)])
def test_a_snapshot_agrees_with_the_probe_about_pretended_cards(
    name: str, make: Callable[[], FakeNvml]
) -> None:
    snapshot = Hardware.model_validate_json((SNAPSHOTS / f"{name}.json").read_text())
    read = probe(nvml=make())
    assert (snapshot.gpus, snapshot.links, snapshot.notes[1:]) == (
        read.gpus,
        read.links,
        read.notes,
    )
