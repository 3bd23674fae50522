"""The work of reading the disk: calls per file, and its place among other programs."""

import io
import json
import os
import sys
from pathlib import Path
from types import FrameType

import pytest

from gateway.models.catalog import disk_program
from gateway.models.catalog.disk import DiskJob
from gateway.models.catalog.disk_program import disk_usage

FILES = 300


def engine_folder(data: Path) -> Path:
    """An engine of FILES files in folders of 30, with a second name and a link for the first."""
    engine = data / "engines" / "vllm-1.0.0"
    for number in range(FILES):
        path = engine / "lib" / f"package{number // 30}" / f"{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 5000)
    first = engine / "lib" / "package0" / "0.py"
    os.link(first, engine / "again.py")
    (engine / "link.py").symlink_to(first)
    (engine / "lib64").symlink_to(engine / "lib")
    return engine


def test_a_file_of_an_engine_costs_a_few_calls(tmp_path: Path) -> None:
    data, calls = tmp_path / "data", 0
    engine = engine_folder(data)
    job = DiskJob(str(tmp_path / "hub"), str(tmp_path / "notes"), str(data))
    disk_usage(job)  # imports

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        (row,) = disk_usage(job)["engines"]
    finally:
        sys.setprofile(None)
    assert calls / FILES < 12
    blocks = {
        (status.st_dev, status.st_ino): status.st_blocks
        for path in engine.rglob("*")
        if not path.is_dir() or path.is_symlink()
        for status in (path.lstat(),)
    }
    assert row["bytes"] == 512 * sum(blocks.values())


def test_reading_is_not_put_behind_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody waits for it, and a nice process waits a minute on a busy machine."""

    class Input:
        buffer = io.BytesIO(
            json.dumps(DiskJob(str(tmp_path), str(tmp_path), str(tmp_path))).encode()
        )

    monkeypatch.setattr(sys, "stdin", Input)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(os, "nice", lambda step: pytest.fail(f"nice {step}"))
    disk_program.main()
