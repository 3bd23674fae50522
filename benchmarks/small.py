"""CPU time of small parts, with targets: python -m benchmarks.small

One line for each figure, the best of some rounds. Tests prove the properties of the same parts that
do not depend on the speed of a machine.
"""

from __future__ import annotations

import json
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from gateway.machine.probe import probe
from gateway.models.catalog.catalog import load
from gateway.models.catalog.hub import Hub
from gateway.proxy.api.protocol import read_request_fields
from gateway.proxy.routing.balance import affine, prefix, weigh
from tests.support.fake_nvml import FakeNvml
from tests.support.model_files import experts, write

NO_HUB = Hub("http://127.0.0.1:9", None, Path("/nonexistent"))


def best(work: Callable[[], object], rounds: int) -> float:
    """Seconds."""
    took = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def choose() -> None:
    """A thousand choices of a replica."""
    messages = [
        {"role": "system", "content": "You are helpful. " * 30},
        {"role": "user", "content": "hi"},
    ]
    body = json.dumps({"messages": messages, "model": "m", "max_tokens": 100}).encode()
    call, seeds = (
        read_request_fields(body),
        [zlib.crc32(f"m.{index}.1".encode()) for index in range(4)],
    )
    for _ in range(1000):
        affine([5, 7, 9, 3], seeds, weigh(call, len(body)), prefix(call) or 0)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), experts(50))
        reading = best(lambda: load(folder, hub=NO_HUB), 5)
    print(
        f"reading a model of 50,000 tensors in 50 files  {reading * 1000:8.0f} ms   to reach: "
        " 500 ms"
    )
    probe_s = best(lambda: probe(Path.cwd(), nvml=FakeNvml([])), 5)
    print(
        f"reading this machine, without GPUs             {probe_s * 1000:8.1f} ms"
        "   to reach:   50 ms"
    )
    print(
        f"choosing a replica                             {best(choose, 20) * 1000:8.1f} µs   to"
        " reach:   20 µs"
    )


if __name__ == "__main__":
    main()
