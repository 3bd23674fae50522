"""uv at work on an environment: its downloads as a bar, its message when it fails."""

from __future__ import annotations

import queue
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

from gateway.cli.terminal import progress_bar
from gateway.domain.units import GIB, MIB

_POLL_S = 0.5
_UNITS = {"B": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB}
# uv 0.13.8 without a terminal: crates/uv/src/commands/reporters.rs.
_DOWNLOAD_LINE = re.compile(r"\s*Downloading (\S+) \(([\d.]+)(B|KiB|MiB|GiB)\)")
_COMPLETION_LINE = re.compile(r"\s*Downloaded (\S+)")
_REPORT_LINE = re.compile(
    r"\s*(?:Using Python |Resolved |Prepared |Installed |Uninstalled |Audited |Building |Built "
    r"|[+~-] )"
)
_NETWORK_COUNTERS = Path("/proc/net/dev")


class PackageDownloads:
    """The downloads that uv announces. uv names packages of more than 1 MiB."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._finished: set[str] = set()

    def read_line(self, line: str) -> bool:
        """Note the downloads in a line of uv. Returns whether it is a report, not a message."""
        if begin := _DOWNLOAD_LINE.match(line):
            self._sizes[begin[1]] = round(float(begin[2]) * _UNITS[begin[3]])
        elif end := _COMPLETION_LINE.match(line):
            self._finished.add(end[1])
        else:
            return _REPORT_LINE.match(line) is not None
        return True

    @property
    def total(self) -> int:
        """Bytes of all announced downloads."""
        return sum(self._sizes.values())

    def count_bytes(self, received_bytes: int) -> int:
        """Bytes of the downloads that are here: at least the finished ones, at most all.

        received_bytes: bytes that came to this machine since the first download. uv names no part
        of a package, and a large one takes minutes.
        """
        finished = sum(size for name, size in self._sizes.items() if name in self._finished)
        return min(max(finished, received_bytes), self.total)


def run_uv(command: Sequence[str], environment: Mapping[str, str], title: str) -> str:
    """Run uv and show its downloads as a bar. "": it succeeded; else its message."""
    lines: queue.Queue[str | None] = queue.Queue()
    with subprocess.Popen(
        command, env=dict(environment), stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:

        def read() -> None:
            for line in process.stderr or ():
                lines.put(line)
            lines.put(None)

        Thread(target=read, name="uv-lines", daemon=True).start()
        message = _show_downloads(lines, title)
    if process.returncode == 0:
        return ""
    return message or f"uv ended with code {process.returncode} and no message."


def _show_downloads(lines: queue.Queue[str | None], title: str) -> str:
    """Show the downloads until the lines end. Returns the lines that are not a report."""
    downloads = PackageDownloads()
    message = ""
    show: Callable[[int, int], None] | None = None
    start = 0
    with ExitStack() as bar:
        while True:
            try:
                line = lines.get(timeout=_POLL_S)
            except queue.Empty:
                line = ""
            if line is None:
                return message
            if line and not downloads.read_line(line):
                message += line
            if downloads.total and show is None:
                show = bar.enter_context(progress_bar(title))
                start = count_received_bytes()
            if show is not None:
                show(downloads.count_bytes(count_received_bytes() - start), downloads.total)


def count_received_bytes(counters: Path = _NETWORK_COUNTERS) -> int:
    """Bytes that came over the busiest network interface; 0 where the system does not count."""
    try:
        rows = counters.read_text().splitlines()[2:]
        return max((int(row.partition(":")[2].split()[0]) for row in rows), default=0)
    except (OSError, ValueError, IndexError):
        return 0
