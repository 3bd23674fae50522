"""The hardware probe: reads NVML, /proc and the cgroups of this process.

Contract: `probe` never fails because a machine lacks something. A refused reading is None, with the
reason in `notes`. On a CPU-only host it is normal that library, driver, permission or card is
missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from gateway.domain import Hardware
from gateway.machine.gpu_cards import Cards
from gateway.machine.meminfo import memory_sizes
from gateway.machine.nvml import Notes, Nvml

# Instruction sets that decide over CPU kernels, in Linux's spelling (`flags` on x86, `Features` on
# Arm).
CPU_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimdhp",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
)


def probe(
    data_dir: Path | None = None, *, nvml: Nvml | None = None, proc: Path = Path("/proc")
) -> Hardware:
    """The hardware of this host. data_dir: for `disk_free_bytes`, or its nearest existing parent.

    A card in MIG mode is listed as its MIG devices (UUID `MIG-...`, with their own memory), because
    engines can use only these. MIG devices have numbers after those of cards, and no `links`.
    Without a MIG device the card itself is listed, with `mig` true.
    """
    notes = Notes()
    if nvml is None:
        import pynvml

        nvml = pynvml
    meminfo = _read_meminfo(proc, notes)
    cards = Cards(
        nvml, notes, proc, host_memory=(meminfo.get("MemTotal"), meminfo.get("MemAvailable"))
    )
    cards.read()
    cpu_name, cpu_features = _read_cpu(proc, notes)
    ram_total, ram_available = _ram(proc, meminfo)
    shm = notes.read("shared memory (/dev/shm)", shutil.disk_usage, Path("/dev", "shm"))
    disk = (
        notes.read(f"free disk at {data_dir}", shutil.disk_usage, _existing_folder(data_dir))
        if data_dir
        else None
    )
    return Hardware(
        arch=os.uname().machine,
        cpu_name=cpu_name,
        cpu_cores=_cores(proc),
        cpu_features=cpu_features,
        ram_total_bytes=ram_total,
        ram_available_bytes=ram_available,
        shm_bytes=shm.total if shm else None,
        disk_free_bytes=disk.free if disk else None,
        driver=cards.driver,
        cuda_driver=cards.cuda,
        gpus=tuple(cards.gpus),
        links=tuple(cards.links),
        notes=tuple(notes.lines),
    )


def _read_meminfo(proc: Path, notes: Notes) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    return memory_sizes(notes.read("RAM", (proc / "meminfo").read_text) or "")


def _read_cpu(proc: Path, notes: Notes) -> tuple[str | None, tuple[str, ...]]:
    """Name and instruction sets of the first core. Linux gives no name on Arm."""
    fields = notes.read("CPU", _first_core, proc / "cpuinfo") or {}
    name = fields.get("model name")
    if name is None:
        notes.add("CPU: name: not in /proc/cpuinfo")
    features = set((fields.get("flags") or fields.get("Features") or "").split())
    return name, tuple(feature for feature in CPU_FEATURES if feature in features)


def _first_core(cpuinfo: Path) -> dict[str, str]:
    fields = {}
    with cpuinfo.open(errors="replace") as lines:
        for line in lines:
            if not line.strip():
                break  # hundreds of cores would cost time
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    return fields


def _cores(proc: Path) -> int:
    """The usable cores: by the CPU affinity, or by the CPU quota of the cgroups if it is less."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders(proc, "cpu"):
        quota, period = [*_read_words(folder / "cpu.max"), "", ""][:2]
        if not quota:  # cgroups v1
            quota = _read_word(folder / "cpu.cfs_quota_us")
            period = _read_word(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, int(quota) // int(period))
    return max(cores, 1)


def _ram(proc: Path, meminfo: dict[str, int]) -> tuple[int, int]:
    """Total and available bytes: of the host, or of the cgroups' memory limit if it is less."""
    total = meminfo.get("MemTotal", 0)
    available = meminfo.get("MemAvailable", 0)
    for folder in _cgroup_folders(proc, "memory"):
        for limit_file, usage_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _read_word(folder / limit_file)
            if not limit.isdigit():  # no such file, or "max"
                continue
            stat = _read_words(folder / "memory.stat")
            # The kernel can free file pages.
            cache = dict(zip(stat[::2], stat[1::2], strict=False)).get(cache_key, "0")
            used_bytes = max(int(_read_word(folder / usage_file) or 0) - int(cache), 0)
            total = min(total, int(limit))
            available = min(available, max(int(limit) - used_bytes, 0))
    return total, available


def _cgroup_folders(proc: Path, controller: str) -> Iterator[Path]:
    """Folders of the cgroups (v1 and v2) of this process for a controller, innermost first.

    A limit on any level holds. In a container the mount shows the container's cgroup as its root.
    """
    paths: dict[str, PurePosixPath] = {}
    for line in _read_lines(proc / "self" / "cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        paths.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    for line in _read_lines(proc / "self" / "mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        match mount.split(), filesystem.split():
            case [_, _, _, root, top, *_], ["cgroup2", *_]:
                group = paths.get("")
            case [_, _, _, root, top, *_], ["cgroup", _, options] if controller in options.split(
                ","
            ):
                group = paths.get(controller)
            case _:
                continue
        relative_group = PurePosixPath()
        if group and group.is_relative_to(root) and ".." not in group.parts:
            relative_group = group.relative_to(root)
        for level in (relative_group, *relative_group.parents):
            yield Path(top) / level


def _read_lines(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text(errors="replace").splitlines()
    return []


def _read_words(file: Path) -> list[str]:
    return " ".join(_read_lines(file)).split()


def _read_word(file: Path) -> str:
    return next(iter(_read_words(file)), "")


def _existing_folder(path: Path) -> Path:
    path = path.absolute()
    return next((folder for folder in (path, *path.parents) if folder.exists()), path)
