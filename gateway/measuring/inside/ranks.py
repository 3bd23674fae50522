"""Measurements of a machine's GPUs: a question on stdin, one line of JSON as the answer.

    {"kind": "measure", "by": "torch", "device": "cuda", "gpus": ["GPU-...", "GPU-..."], "count": 2,
     "groups": [[0, 1]], "pairs": [[0, 1]], "copy_bytes": 402653184, "matmul": 8192, "reduce_bytes":
     [16384, 67108864], "sample_s": 0.02, "part_s": 45, "limit_s": 80}

    {"measured": {"software": "torch 2.11.0+cu130", "problems": ["all_reduce of 0, 1: nothing came
                  within 30 s"], "numbers": [{"what": "memory", "gpus": [0], "value": 4.1e12,
                  "spread": 0.004}, ...]}}

by: `torch` of this Python, or only the `driver`, without products. device: `cpu` replaces GPUs in
tests. gpus: null means all GPUs. Each GPU has a process. All processes do the same part at the same
time. A part that takes longer than part_s is ended, and the results before it stay.

Units of values: bytes/s (memory counts each byte as read and written), FLOP/s, seconds. The spread
is the relative difference of samples.
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

_MEASURERS = {"torch": ("by_torch", "TorchMeasurer"), "driver": ("by_driver", "DriverMeasurer")}
# NVLS is off, as in engines: on some machines with NVSwitch it breaks. All traffic stays on this
# host.
_VARIABLES = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


def measure(question: dict[str, Any]) -> dict[str, Any]:
    """All numbers measured within the limit, and problems in words."""
    os.environ.update(_VARIABLES)
    if question["gpus"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(question["gpus"])
    deadline_s = time.monotonic() + question["limit_s"]
    ranks = [RankProcess(question, number) for number in range(question["count"])]
    result: dict[str, Any] = {"software": None, "numbers": [], "problems": []}
    try:
        for part in parts(question):
            limit_s = min(question["part_s"], deadline_s - time.monotonic())
            if limit_s <= 0:
                result["problems"].append(f"{part_text(part)}: no time was left")
                break
            if not run_part(ranks, part, limit_s, result):
                break
    finally:
        for rank in ranks:
            rank.stop()
    return result


def parts(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of the measurement. The most fragile parts come last."""
    yield {"part": "own", "group": [*range(question["count"])]}
    for part, groups in (
        ("peers", question["pairs"]),
        ("reduce", question["groups"]),
        ("graphs", question["groups"]),
    ):
        yield from ({"part": part, "group": group} for group in groups)


def part_text(job: dict[str, Any]) -> str:
    titles = {
        "own": "memory and products of",
        "peers": "copies between",
        "reduce": "all-reduce of",
        "graphs": "all-reduce in a graph of",
    }
    return f"{titles[job['part']]} GPUs {', '.join(map(str, job['group']))}"


def run_part(
    ranks: list[RankProcess], job: dict[str, Any], limit_s: float, result: dict[str, Any]
) -> bool:
    """Run a part on all ranks and collect its numbers. False ends the measurement."""
    deadline_s = time.monotonic() + limit_s
    waiting_ranks = {rank.answers: rank for rank in ranks}
    are_all_done = True
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            rank.send(job)
            selector.register(rank.answers, selectors.EVENT_READ)
        while waiting_ranks:
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                missing_ranks = ", ".join(str(rank.number) for rank in waiting_ranks.values())
                result["problems"].append(
                    f"{part_text(job)}: nothing came from GPU {missing_ranks}"
                    f" within {limit_s:.2g} s"
                )
                return False
            for key, _ in ready:
                rank = waiting_ranks[key.fd]
                lines = rank.lines()
                if lines is None:
                    result["problems"].append(
                        f"{part_text(job)}: the process of GPU {rank.number} ended"
                    )
                    if job["part"] != "own":
                        return False
                    are_all_done = False
                    del waiting_ranks[key.fd]
                    selector.unregister(key.fd)
                    continue
                for line in lines:
                    if "software" in line:
                        result["software"] = line["software"]
                    elif "problem" in line:
                        result["problems"].append(f"{part_text(job)}: {line['problem']}")
                    elif "what" in line:
                        result["numbers"].append(line)
                    else:
                        del waiting_ranks[key.fd]
                        selector.unregister(key.fd)
    return are_all_done


class RankProcess:
    """The parent's side of the process of one GPU: a pipe for parts, a pipe for lines of JSON."""

    def __init__(self, question: dict[str, Any], number: int) -> None:
        self.number = number
        self._unfinished_line = b""
        question_fd, self._questions = os.pipe()
        self.answers, answer_fd = os.pipe()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._questions)
            os.close(self.answers)
            run_rank(question, number, question_fd, answer_fd)
        os.close(question_fd)
        os.close(answer_fd)

    def send(self, job: dict[str, Any]) -> None:
        # The next read sees the end of the process.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._questions, json.dumps(job).encode() + b"\n")

    def lines(self) -> list[dict[str, Any]] | None:
        """New lines of the process. None after its end."""
        text = os.read(self.answers, 1 << 16)
        *lines, self._unfinished_line = (self._unfinished_line + text).split(b"\n")
        return [json.loads(line) for line in lines] if text else None

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._questions)
        os.close(self.answers)


def _measurer(question: dict[str, Any], number: int) -> Any:
    """The measurer that the question names. The measurer's module imports packages that only some
    machines have."""
    module, name = _MEASURERS[question["by"]]
    return getattr(importlib.import_module(f".{module}", __package__), name)(question, number)


def run_rank(question: dict[str, Any], number: int, question_fd: int, answer_fd: int) -> None:
    """Do parts in the process of one GPU until the pipe ends."""
    measurer: Any = None
    try:
        with os.fdopen(question_fd) as parts:
            for text in parts:
                part = json.loads(text)
                try:
                    if measurer is None:
                        measurer = _measurer(question, number)
                        say(answer_fd, software=measurer.software)
                    methods = {
                        "own": measurer.single_gpu,
                        "peers": measurer.peers,
                        "reduce": measurer.reduce,
                        "graphs": measurer.graphs,
                    }
                    for line in methods[part["part"]](part["group"]):
                        say(answer_fd, **line)
                except Exception as error:
                    say(answer_fd, problem=f"GPU {number}: {type(error).__name__}: {error}"[:500])
                say(answer_fd, end=True)
    finally:
        os._exit(0)


def say(answer_fd: int, **line: Any) -> None:
    os.write(answer_fd, json.dumps(line).encode() + b"\n")
