"""Files of operators that are pipes, devices, too long, or on a mount that hangs."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path

import pytest

from gateway.errors import BadRequest, SettingsError
from gateway.file_reading import FileReader, read_file
from gateway.proxy.access.endpoint_keys import FOLDER, EndpointKeys, NoKeyError
from gateway.proxy.tls import Certificate
from gateway.wishes.models_file import load
from gateway.wishes.references import References, UnresolvedReferenceError

pytestmark = pytest.mark.anyio


def pipe(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def test_a_pipe_a_device_and_a_folder_are_refused_and_a_file_is_cut(tmp_path: Path) -> None:
    for path in (pipe(tmp_path, "pipe"), Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path, 10)
    (tmp_path / "file").write_bytes(b"0123456789")
    assert read_file(tmp_path / "file", 4) == b"0123"


def test_nothing_that_operators_name_waits_for_the_writer_of_a_pipe(tmp_path: Path) -> None:
    path = pipe(tmp_path, f"{FOLDER}/pipe")
    with pytest.raises(BadRequest, match="not a regular file"):
        load(path)
    with pytest.raises(UnresolvedReferenceError, match="not a regular file"):
        References(path.parent).resolve("${file:pipe}")
    with pytest.raises(SettingsError, match="not a regular file"):
        Certificate(path, None)
    with pytest.raises(NoKeyError, match="not a regular file"):
        EndpointKeys(tmp_path).read("file:pipe")


async def test_a_reading_that_hangs_is_not_begun_again_and_its_result_is_taken_later() -> None:
    reading_count, free = 0, threading.Event()

    def read() -> int:
        nonlocal reading_count
        reading_count += 1
        free.wait()
        return reading_count

    reader = FileReader(read, patience_s=0.01)
    for _ in range(3):
        with pytest.raises(OSError, match="no answer of the file system"):
            await reader.result()
    assert reading_count == 1
    free.set()
    while True:
        try:
            assert await reader.result() == 1
        except OSError:
            await asyncio.sleep(0)
        else:
            break
    assert await FileReader(read, patience_s=60).result() == 2


async def test_an_error_of_the_reading_is_raised() -> None:
    with pytest.raises(FileNotFoundError):
        await FileReader(lambda: read_file("/absent", 1)).result()


async def test_an_error_after_its_caller_has_left_disturbs_nobody() -> None:
    free, faults = threading.Event(), list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))

    def read() -> bytes:
        free.wait()
        return read_file("/absent", 1)

    reader = FileReader(read, patience_s=0.01)
    with pytest.raises(OSError, match="no answer of the file system"):
        await reader.result()
    call = reader._call
    assert call is not None
    free.set()
    while not call.done():
        await asyncio.sleep(0.001)
    del reader, call
    gc.collect()
    assert not faults
