"""The bar of `fitserve engine install`, from lines of uv."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.cli import package_downloads
from gateway.cli.package_downloads import PackageDownloads, count_received_bytes, run_uv
from gateway.domain.units import MIB

LINES = """Using Python 3.12.3 environment at: env
Resolved 2 packages in 634ms
Downloading torch (800.0MiB)
Downloading numpy (16.5MiB)
 Downloaded numpy
 Downloaded torch
Prepared 2 packages in 2.63s
Installed 2 packages in 169ms
 + numpy==2.4.6
 + torch==2.13.0
"""


def test_downloads_count_between_finished_ones_and_all() -> None:
    downloads = PackageDownloads()
    lines = LINES.splitlines()
    assert all(downloads.read_line(line) for line in lines[:5])
    assert downloads.total == round(816.5 * MIB)
    assert downloads.count_bytes(0) == round(16.5 * MIB)
    assert downloads.count_bytes(100 * MIB) == 100 * MIB
    assert downloads.count_bytes(2000 * MIB) == downloads.total
    assert all(downloads.read_line(line) for line in lines[5:])
    assert downloads.count_bytes(0) == downloads.total


def test_lines_that_are_no_report_are_the_message() -> None:
    downloads = PackageDownloads()
    assert not downloads.read_line("error: Failed to fetch the page of tinypart\n")
    assert not downloads.read_line("  x No solution found when resolving dependencies:\n")


def test_the_bar_begins_with_the_first_download_and_ends_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int, int]] = []

    @contextmanager
    def bar(title: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda byte_count, total: calls.append((title, byte_count, total))

    monkeypatch.setattr(package_downloads, "progress_bar", bar)
    monkeypatch.setattr(package_downloads, "count_received_bytes", lambda: 0)
    lines: queue.Queue[str | None] = queue.Queue()
    for line in (*LINES.splitlines(keepends=True), None):
        lines.put(line)
    assert package_downloads._show_downloads(lines, "vllm") == ""
    assert calls[0] == ("vllm", 0, 800 * MIB)
    assert calls[-1] == ("vllm", round(816.5 * MIB), round(816.5 * MIB))


def test_a_failed_download_gives_only_its_message() -> None:
    program = (
        "import sys; sys.stderr.write('Resolved 1 package in 1ms\\nerror: no\\n'); sys.exit(2)"
    )
    assert run_uv([sys.executable, "-c", program], {}, "vllm") == "error: no\n"
    assert "code 3" in run_uv([sys.executable, "-c", "raise SystemExit(3)"], {}, "vllm")
    assert run_uv([sys.executable, "-c", ""], {}, "vllm") == ""


def test_the_busiest_interface_counts(tmp_path: Path) -> None:
    counters = tmp_path / "dev"
    counters.write_text(
        "Inter-|   Receive\n face |bytes\n    lo:  17 1 0\n  eth0: 3000 4 0\n wlan0:1000 1 0\n"
    )
    assert count_received_bytes(counters) == 3000
    assert count_received_bytes(tmp_path / "none") == 0
