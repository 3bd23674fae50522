"""GPU architectures of an engine's extensions, read in their files without a driver or CUDA.

A section .nv_fatbin is a row of fat binaries. Each of these is a row of entries, one for a kernel
file and an architecture. cuobjdump --list-elf and --list-ptx print the same.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAGIC = b"\x50\xed\x55\xba"
_PTX = 1
_ELF = 2
# Bits of an entry's flags: code only for this architecture ("a"), and for its family ("f").
_EXACT_BIT = 0x100000
_FAMILY_BIT = 0x200000
# A damaged file may say anything of its own length.
_MAX_ENTRIES = 100_000


def compiled_architectures(folder: Path) -> dict[str, list[str]]:
    """Extension of this package -> architectures of its code.

    sm_90a is code for a GPU; compute_80 is PTX, which later GPUs compile for themselves. Extensions
    without code for GPUs are left out.
    """
    result = {}
    for path in sorted(folder.rglob("*.so")):
        if capabilities := sorted(
            _file_architectures(path),
            key=lambda capability: (capability[0], int(re.sub(r"\D", "", capability)), capability),
        ):
            result[str(path.relative_to(folder)).partition(".")[0]] = capabilities
    return result


def common(extensions: Iterable[list[str]]) -> list[str]:
    """The architectures that every extension has."""
    result = [*extensions]
    return (
        [
            capability
            for capability in result[0]
            if all(capability in capabilities for capabilities in result)
        ]
        if result
        else []
    )


def cuda_major(folder: Path) -> int | None:
    """The CUDA runtime that the extensions ask the loader for; None: none does."""
    for path in sorted(folder.rglob("*.so")):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if match := re.search(rb"libcudart\.so\.(\d+)", data):
                return int(match[1])
    return None


def _file_architectures(path: Path) -> set[str]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return {
                name
                for start, size in _sections(data, b".nv_fatbin")
                for name in _section_entries(data, start, min(start + size, len(data)))
            }
    except (OSError, ValueError, struct.error):  # not an ELF file, or a damaged one
        return set()


def _sections(data: mmap.mmap, section_name: bytes) -> Iterator[tuple[int, int]]:
    """Offset and size of each section of this name in a 64-bit ELF file."""
    if data[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", data, table + number * size) for number in range(count)]
    for name, _, _, _, offset, length in rows:
        start = rows[names][4] + name
        if data[start : start + len(section_name) + 1] == section_name + b"\0":
            yield offset, length


def _section_entries(data: mmap.mmap, start: int, end: int) -> Iterator[str]:
    for _ in range(_MAX_ENTRIES):
        start = data.find(_MAGIC, start, end)
        if start < 0:
            return
        _, header, length = struct.unpack_from("<HHQ", data, start + 4)
        entry = start + header
        start = start + header + length
        while entry < min(start, end):
            kind, _, header, length = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            (flags,) = struct.unpack_from("<Q", data, entry + 40)
            suffix = "f" if flags & _FAMILY_BIT else ""
            suffix = "a" if flags & _EXACT_BIT else suffix
            if kind == _ELF:
                yield f"sm_{architecture}{suffix}"
            elif kind == _PTX:
                yield f"compute_{architecture}{suffix}"
            if not header + length:
                return
            entry += header + length
