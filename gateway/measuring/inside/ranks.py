"""Measures this machine: what its GPUs do in a second, and how fast they reach each other. A
    document in, one line out:

    {"kind": "measure", "by": "torch", "device": "cuda", "gpus": ["GPU-...", "GPU-..."], "count": 2,
     "groups": [[0, 1]], "pairs": [[0, 1]], "copy_bytes": 402653184, "matmul": 8192, "reduce_bytes":
     [16384, 67108864], "sample_s": 0.02, "part_s": 45, "limit_s": 80}

    {"measured": {"software": "torch 2.11.0+cu130", "problems": ["all_reduce of 0, 1: nothing came
                  within 30 s"], "numbers": [{"what": "memory", "gpus": [0], "value": 4.1e12,
                  "spread": 0.004}, ...]}}

by: `torch` of the Python that runs this, or the `driver` alone, which multiplies nothing. device
`cpu` stands for GPUs where there are none. gpus: null means those that are there. Each GPU has a
process of its own. Those do one part after the other, all at once, and what takes longer than
part_s is ended: parts before it are kept. A value is bytes/s (memory: each byte copied is read and
written), FLOP/s by format, seconds; its spread is the part by which samples differ.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

# NVLS is left out: engines leave it out too, and on some machines with NVSwitch it breaks what it
# touches. All of it stays on this host.
_VARIABLES = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def measured(asked: dict[str, Any]) -> dict[str, Any]:
    """Everything that could be measured until the limit, and what could not, in words."""
    os.environ.update(_VARIABLES)
    if asked["gpus"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(asked["gpus"])
    end = time.monotonic() + asked["limit_s"]
    ranks = [Rank(asked, number) for number in range(asked["count"])]
    found: dict[str, Any] = {"software": None, "numbers": [], "problems": []}
    try:
        for part in parts(asked):
            left = min(asked["part_s"], end - time.monotonic())
            if left <= 0:
                found["problems"].append(f"{told(part)}: no time was left")
                break
            if not together(ranks, part, left, found):
                break
    finally:
        for rank in ranks:
            rank.end()
    return found


def parts(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What may break most comes last."""
    yield {"part": "own", "group": [*range(asked["count"])]}
    for part, groups in (
        ("peers", asked["pairs"]),
        ("reduce", asked["groups"]),
        ("graphs", asked["groups"]),
    ):
        yield from ({"part": part, "group": group} for group in groups)


def told(part: dict[str, Any]) -> str:
    what = {
        "own": "memory and products of",
        "peers": "copies between",
        "reduce": "all-reduce of",
        "graphs": "all-reduce in a graph of",
    }
    return f"{what[part['part']]} GPUs {', '.join(map(str, part['group']))}"


def together(
    ranks: list[Rank], part: dict[str, Any], limit_s: float, found: dict[str, Any]
) -> bool:
    """Have all ranks do the part; whether they all did. Who does not come to an end has no next
    part."""
    end, waiting, whole = time.monotonic() + limit_s, {rank.said: rank for rank in ranks}, True
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            rank.tell(part)
            selector.register(rank.said, selectors.EVENT_READ)
        while waiting:
            ready = selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                late = ", ".join(str(rank.number) for rank in waiting.values())
                found["problems"].append(
                    f"{told(part)}: nothing came from GPU {late} within {limit_s:.2g} s"
                )
                return False
            for key, _ in ready:
                rank = waiting[key.fd]
                lines = rank.lines()
                if lines is None:
                    found["problems"].append(
                        f"{told(part)}: the process of GPU {rank.number} ended"
                    )
                    if part["part"] != "own":
                        return False
                    whole = False
                    del waiting[key.fd]
                    selector.unregister(key.fd)
                    continue
                for line in lines:
                    if "software" in line:
                        found["software"] = line["software"]
                    elif "problem" in line:
                        found["problems"].append(f"{told(part)}: {line['problem']}")
                    elif "what" in line:
                        found["numbers"].append(line)
                    else:
                        del waiting[key.fd]
                        selector.unregister(key.fd)
    return whole


class Rank:
    """The process of one GPU, as its parent sees it: parts go down one pipe, lines of JSON come up
    another."""

    def __init__(self, asked: dict[str, Any], number: int) -> None:
        self.number, self._rest = number, b""
        below, self._tell = os.pipe()
        self.said, above = os.pipe()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._tell)
            os.close(self.said)
            work(asked, number, below, above)
        os.close(below)
        os.close(above)

    def tell(self, part: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is seen where it is read
            os.write(self._tell, json.dumps(part).encode() + b"\n")

    def lines(self) -> list[dict[str, Any]] | None:
        """None: it ended."""
        text = os.read(self.said, 1 << 16)
        *whole, self._rest = (self._rest + text).split(b"\n")
        return [json.loads(line) for line in whole] if text else None

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._tell)
        os.close(self.said)


def work(asked: dict[str, Any], number: int, below: int, above: int) -> None:
    """What the process of one GPU does until its parts end."""
    body: Any = None
    try:
        with os.fdopen(below) as parts:
            for text in parts:
                part = json.loads(text)
                try:
                    if body is None:
                        body = importlib.import_module(f".by_{asked['by']}", __package__).Body(
                            asked, number
                        )
                        say(above, software=body.software)
                    doing = {
                        "own": body.own,
                        "peers": body.peers,
                        "reduce": body.reduce,
                        "graphs": body.graphs,
                    }
                    for line in doing[part["part"]](part["group"]):
                        say(above, **line)
                except Exception as error:
                    say(above, problem=f"GPU {number}: {type(error).__name__}: {error}"[:500])
                say(above, end=True)
    finally:
        os._exit(0)


def say(above: int, **line: Any) -> None:
    os.write(above, json.dumps(line).encode() + b"\n")
