"""The memory that the threads of a gateway keep for themselves."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import httpx

from tests.support.patience import hang_s
from tests.support.served import serve_models

# A heap of a thread begins at a multiple of its size in glibc (HEAP_MAX_SIZE of arena.c).
_HEAP_BYTES = 64 * 1024 * 1024
_ADMIN = "an-admin-key-of-this-test-that-nobody-guesses"


def _thread_heaps(pid: int) -> list[str]:
    """The heaps that glibc reserved for threads: used pages, and the rest of the reservation."""
    ranges = [
        (int(begin, 16), int(end, 16), access)
        for begin, end, access in re.findall(
            r"^(\w+)-(\w+) (\S+) \S+ 00:00 0 *$",
            Path(f"/proc/{pid}/maps").read_text(),
            re.MULTILINE,
        )
    ]
    return [
        f"{begin:x}"
        for (begin, middle, access), (rest, end, rest_access) in itertools.pairwise(ranges)
        if begin % _HEAP_BYTES == 0
        and (middle, end) == (rest, begin + _HEAP_BYTES)
        and access.startswith("rw")
        and rest_access.startswith("---")
    ]


def test_no_thread_of_a_gateway_keeps_a_heap(tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {_ADMIN}"}
    with serve_models(tmp_path, {}, _ADMIN) as gateway:
        with httpx.Client(
            base_url=gateway.url, headers=headers, trust_env=False, timeout=hang_s()
        ) as client:
            for name in ("one", "two"):
                client.post("/admin/keys", json={"name": name}).raise_for_status()
                client.get("/admin/usage").raise_for_status()
        assert len(list(Path(f"/proc/{gateway.process.pid}/task").iterdir())) > 1
        assert _thread_heaps(gateway.process.pid) == []
