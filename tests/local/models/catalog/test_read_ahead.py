"""Weights in the page cache: read from the disk once, never cached ones, and no more than is
allowed."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from gateway.engines.registry import engine_kind
from gateway.models.catalog.page_cache_program import BLOCK
from gateway.models.catalog.read_ahead import ReadAhead, files_of_weights, read_ahead
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio

SIZE = 8 * BLOCK


def write_file(path: Path, size: int = SIZE) -> Path:
    """A file of data that is not in the page cache. Linux may need several calls for that."""
    path.write_bytes(os.urandom(1024) * (size // 1024))
    for _ in range(200):
        forget(path)
        if not cached_blocks(path):
            return path
        time.sleep(0.05)
    pytest.skip("files stay in memory here")


def forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_blocks(path: Path) -> int:
    """The blocks of a file whose middle is in the page cache: a look brings the page there.

    Skips where Linux cannot tell.
    """
    descriptor, count = os.open(path, os.O_RDONLY), 0
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        for begin in range(0, path.stat().st_size, BLOCK):
            try:
                count += os.preadv(descriptor, [bytearray(1)], begin + BLOCK // 2, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError:
                pytest.skip("this file system does not tell what is in the page cache")
    finally:
        os.close(descriptor)
    return count


async def test_files_are_read_once(tmp_path: Path) -> None:
    files = [write_file(tmp_path / name) for name in ("a", "b")]
    first = await read_ahead(files, 10 * SIZE)
    assert first.read > 0
    assert sum(first) == 2 * SIZE
    assert [cached_blocks(path) for path in files] == [8, 8]
    assert await read_ahead(files, 10 * SIZE) == ReadAhead(cached=2 * SIZE)


async def test_no_more_is_read_than_memory_is_free(tmp_path: Path) -> None:
    files = [write_file(tmp_path / name) for name in ("a", "b")]
    assert sum(await read_ahead(files, SIZE + 2 * BLOCK)) == SIZE + 2 * BLOCK
    assert cached_blocks(files[0]) == 8
    assert await read_ahead(files, 0) == ReadAhead()


async def test_holes_and_missing_files_and_pipes_cost_nothing(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(2**40)
    os.mkfifo(tmp_path / "pipe")
    last_file = write_file(tmp_path / "last")
    files = [tmp_path / "missing", tmp_path / "pipe", tmp_path, sparse, last_file]
    assert sum(await read_ahead(files, SIZE)) == SIZE
    assert cached_blocks(last_file) == 8


async def test_a_cancelled_reading_leaves_no_process(tmp_path: Path) -> None:
    files = [write_file(tmp_path / "a")] * 100_000
    reading = asyncio.create_task(read_ahead(files, 10**18))
    async with asyncio.timeout(hang_s()):
        while not (pids := readers()):
            await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert not pids & readers()


def readers() -> set[int]:
    """Pids of the reading programs that this process has started."""
    pids = set()
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            command = (entry / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if int(parent) == os.getpid() and b"page_cache_program" in command:
            pids.add(int(entry.name))
    return pids


PREFIX = engine_kind("vllm").weights_prefix
BOTH = ["model.safetensors", "consolidated.safetensors"]
INDEX = {"weight_map": {"x": "m-00002-of-00002.safetensors", "y": "m-00001-of-00002.safetensors"}}


@pytest.mark.parametrize(
    ("names", "prefix", "load_format", "read"),
    [
        (["model.safetensors", "other.safetensors"], PREFIX, "", ["model.safetensors"]),
        (["b.safetensors", "a.safetensors"], PREFIX, "auto", ["a.safetensors", "b.safetensors"]),
        (
            BOTH,
            PREFIX,
            "",
            ["consolidated.safetensors"],
        ),
        (BOTH, PREFIX, "hf", ["model.safetensors"]),
        (BOTH, "", "", ["model.safetensors"]),
        (["model.safetensors"], PREFIX, "dummy", []),
        (["model.safetensors"], PREFIX, "runai_streamer", []),
        (["model.safetensors"], PREFIX, "fastsafetensors", []),
        (["pytorch_model.bin"], PREFIX, "", []),
        ([], PREFIX, "", []),
    ],
)
def test_exactly_the_files_of_the_engine_are_read_ahead(
    tmp_path: Path, names: list[str], prefix: str, load_format: str, read: list[str]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in files_of_weights(tmp_path, prefix, load_format)] == read


def test_files_outside_of_the_index_are_not_read(tmp_path: Path) -> None:
    for name in (*INDEX["weight_map"].values(), "draft.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    names = [path.name for path in files_of_weights(tmp_path, PREFIX, "")]
    assert names == ["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"]


def test_a_folder_that_is_gone_has_no_files(tmp_path: Path) -> None:
    assert files_of_weights(tmp_path / "gone", PREFIX, "") == []
