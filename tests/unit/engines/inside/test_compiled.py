"""The architectures that extensions hold code for, as cuobjdump lists them. The files are made
here, in the form of those of vLLM's wheels."""

import struct
from pathlib import Path

import pytest

from gateway.engines.inside.compiled import common, compiled_architectures, cuda_major

PTX, ELF, ALONE, FAMILY, PACKED = 1, 2, 0x100000, 0x200000, 0x8011


def fat_binary(*entries: tuple[int, int, int]) -> bytes:
    """entries: kind, architecture, flags."""
    body = b""
    for kind, architecture, flags in entries:
        code = b"\x7fELF" * 4
        body += (
            struct.pack(
                "<HHIQIIHHIIIQQQ",
                kind,
                257,
                64,
                len(code),
                0,
                0,
                8,
                1,
                architecture,
                0,
                0,
                flags,
                0,
                0,
            )
            + code
        )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def shared_object(
    section: bytes, name: bytes = b".nv_fatbin", section_names: bytes = b"libcudart.so.13"
) -> bytes:
    names = b"\0" + name + b"\0.shstrtab\0" + section_names + b"\0"
    head = bytearray(64)
    head[:5] = b"\x7fELF\x02"
    where = 64 + len(section) + len(names)
    struct.pack_into("<Q", head, 0x28, where)
    struct.pack_into("<HHH", head, 0x3A, 64, 3, 2)
    rows = [
        struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, 64, len(section), 0, 0, 8, 0),
        struct.pack(
            "<IIQQQQIIQQ", 2 + len(name), 3, 0, 0, 64 + len(section), len(names), 0, 0, 1, 0
        ),
    ]
    return bytes(head) + section + names + b"".join(rows)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    architectures = (
        fat_binary((ELF, 75, PACKED), (ELF, 90, ALONE | PACKED))
        + b"\0" * 24
        + fat_binary((ELF, 100, FAMILY), (PTX, 80, PACKED))
    )
    (tmp_path / "_C.abi3.so").write_bytes(shared_object(architectures))
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90/_moe_C.abi3.so").write_bytes(
        shared_object(fat_binary((ELF, 90, ALONE), (ELF, 75, 0)))
    )
    (tmp_path / "plain.so").write_bytes(
        shared_object(architectures, name=b".text", section_names=b"libc.so.6")
    )
    return tmp_path


def test_each_extension_with_gpu_code_lists_its_architectures(
    package: Path,
) -> None:
    architectures = compiled_architectures(package)
    assert architectures == {
        "_C": ["compute_80", "sm_75", "sm_90a", "sm_100f"],
        "sm90/_moe_C": ["sm_75", "sm_90a"],
    }
    assert common(architectures.values()) == ["sm_75", "sm_90a"]
    assert common([]) == []
    assert cuda_major(package) == 13


def test_truncated_files_and_false_lengths_end_with_the_readable_part(
    package: Path,
) -> None:
    whole = (package / "_C.abi3.so").read_bytes()
    for length in (0, 3, 40, 80, len(whole) - 100):
        (package / "_C.abi3.so").write_bytes(whole[:length])
        assert set(compiled_architectures(package)) <= {"_C", "sm90/_moe_C"}
    lying = bytearray(fat_binary((ELF, 75, 0), (ELF, 80, 0)))
    struct.pack_into("<Q", lying, 8, 2**63)  # the row's length
    struct.pack_into("<IQ", lying, 16 + 4, 0, 0)  # the first entry's
    (package / "_C.abi3.so").write_bytes(shared_object(bytes(lying)))
    assert compiled_architectures(package)["_C"] == ["sm_75"]
