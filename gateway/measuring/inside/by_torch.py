"""One rank measures by torch: copies, products, all-reduces. The device is a parameter, so that a
CPU runs the same lines."""

from __future__ import annotations

import importlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from .timing import number, sampled, seconds

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

_IN_GRAPH = 50
_SMALL_COPY = 4096
_CHECKED_BYTES = 4 << 20
_SMALL = 1 << 20


class Body:
    def __init__(self, asked: dict[str, Any], rank: int) -> None:
        self.asked, self.rank = asked, rank
        self.cuda = asked["device"] == "cuda"
        self.software = f"torch {torch.__version__}"
        self.device = self.at(rank)
        if self.cuda:
            torch.cuda.set_device(self.device)
        torch.manual_seed(rank)
        self.groups: dict[tuple[int, ...], Any] = {}

    def at(self, rank: int) -> Any:
        return torch.device("cuda", rank) if self.cuda else torch.device("cpu")

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def freed(self) -> None:
        if self.cuda:
            torch.cuda.empty_cache()

    # --- one GPU ---

    def own(self, group: list[int]) -> Iterator[dict[str, Any]]:
        for what, measure in (("memory", self.memory), ("launch", self.launch), *self.products()):
            try:
                value, spread = measure()
                yield number(what, [self.rank], value, spread)
            except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
                yield {"problem": f"GPU {self.rank}, {what}: {error}"[:500]}
            self.freed()

    def memory(self) -> tuple[float, float]:
        """Bytes/s, read and written."""
        size = self.asked["copy_bytes"]
        source = torch.randint(-128, 127, (size,), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        took, spread = seconds(lambda: target.copy_(source), self.wait, self.asked["sample_s"])
        return 2 * size / took, spread

    def launch(self) -> tuple[float, float]:
        """Seconds in which Python launches one operation that takes the GPU less."""
        small = torch.zeros(256, device=self.device)
        return seconds(lambda: small.add_(1), lambda: None, self.asked["sample_s"])

    def products(self) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
        capability = torch.cuda.get_device_capability(self.device) if self.cuda else (0, 0)
        yield "float16" if self.cuda and capability < (8, 0) else "bfloat16", self.of_16_bits
        if not self.cuda or capability >= (7, 5):
            yield "int8", self.of_int8
        if capability >= (8, 9):
            yield "fp8", self.of_fp8

    def of_16_bits(self) -> tuple[float, float]:
        old = self.cuda and torch.cuda.get_device_capability(self.device) < (8, 0)
        dtype = torch.float16 if old else torch.bfloat16
        a, b, c = (self.random(dtype) for _ in range(3))
        return self.flops(lambda: torch.matmul(a, b, out=c))

    def of_int8(self) -> tuple[float, float]:
        a, b = (self.random(torch.int8) for _ in range(2))
        return self.flops(lambda: torch._int_mm(a, b.t()))

    def of_fp8(self) -> tuple[float, float]:
        a, b = (self.random(torch.bfloat16).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=self.device)
        return self.flops(
            lambda: torch._scaled_mm(
                a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )

    def random(self, dtype: Any) -> Any:
        """Zeros would take less power, and so be multiplied faster."""
        size = (self.asked["matmul"],) * 2
        if dtype == torch.int8:
            return torch.randint(-128, 127, size, dtype=dtype, device=self.device)
        return torch.randn(size, dtype=dtype, device=self.device)

    def flops(self, run: Callable[[], object]) -> tuple[float, float]:
        took, spread = seconds(run, self.wait, self.asked["sample_s"])
        return 2 * self.asked["matmul"] ** 3 / took, spread

    # --- several GPUs ---

    def reduce(self, group: list[int]) -> Iterator[dict[str, Any]]:
        """Seconds of one all-reduce of so many bytes, as the first of the group sees them."""
        ranks = self.joined(group)
        if self.rank not in group:
            return
        for size in self.asked["reduce_bytes"]:
            data = torch.ones(size // 4, dtype=torch.float32, device=self.device)
            dist.all_reduce(data, group=ranks)
            if not bool((data == len(group)).all()):
                raise RuntimeError(f"an all-reduce of {size} bytes gave wrong sums")
            data.zero_()
            took, spread = self.agreed(partial(dist.all_reduce, data, group=ranks), ranks)
            if self.rank == group[0]:
                yield number("all_reduce", group, took, spread, bytes=size)

    def graphs(self, group: list[int]) -> Iterator[dict[str, Any]]:
        """The same of small ones in a CUDA graph, as engines have them: without what Python needs
        to launch each. A capture that fails
        leaves a process fit for nothing else, so this comes last."""
        if not self.cuda or self.rank not in group:
            return
        ranks = self.joined(group)
        for size in self.asked["reduce_bytes"]:
            if size <= _SMALL:
                data, graph = (
                    torch.zeros(size // 4, dtype=torch.float32, device=self.device),
                    torch.cuda.CUDAGraph(),
                )
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    for _ in range(_IN_GRAPH):
                        dist.all_reduce(data, group=ranks)
                took, spread = self.agreed(graph.replay, ranks)
                if self.rank == group[0]:
                    yield number("all_reduce", group, took / _IN_GRAPH, spread, bytes=size)

    def joined(self, group: list[int]) -> Any:
        """A file is where ranks find each other: no port, no name of this host."""
        if not dist.is_initialized():
            store = f"file://{Path(tempfile.gettempdir())}/measuring-{os.getppid()}"
            dist.init_process_group(
                "nccl" if self.cuda else "gloo",
                init_method=store,
                rank=self.rank,
                world_size=self.asked["count"],
            )
        if tuple(group) not in self.groups:
            self.groups[tuple(group)] = dist.new_group(group)
        return self.groups[tuple(group)]

    def agreed(self, run: Callable[[], object], ranks: Any) -> tuple[float, float]:
        """As `seconds`, with as many runs on each rank."""
        for _ in range(5):
            run()
        took, _ = sampled(run, self.wait, 1)
        count = torch.tensor([max(1, math.ceil(self.asked["sample_s"] / took))], device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=ranks)
        return sampled(run, self.wait, int(count))

    def peers(self, pair: list[int]) -> Iterator[dict[str, Any]]:
        """Copies from one GPU's memory into another's, by the process of the first."""
        if self.rank != pair[0]:
            return
        here, there = self.at(pair[0]), self.at(pair[1])
        works = not self.cuda or torch.cuda.can_device_access_peer(pair[0], pair[1])
        sent = torch.randint(-128, 127, (_CHECKED_BYTES,), dtype=torch.int8, device=here)
        got = torch.zeros_like(sent, device=there)
        got.copy_(sent)
        right = torch.equal(sent.cpu(), got.cpu())
        yield number("peer_access", pair, float(works), 0.0)
        if not right:
            yield number("peer_broken", pair, float(works), 0.0)
            yield {"problem": f"what GPU {pair[0]} copied to GPU {pair[1]} arrived wrong"}
            return
        for what, size in (("peer_latency", _SMALL_COPY), ("peer", self.asked["copy_bytes"])):
            source = torch.empty(size, dtype=torch.int8, device=here)
            target = torch.empty(size, dtype=torch.int8, device=there)

            def wait() -> None:
                for device in (here, there):
                    if self.cuda:
                        torch.cuda.synchronize(device)

            took, spread = seconds(partial(target.copy_, source), wait, self.asked["sample_s"])
            yield number(what, pair, size / took if what == "peer" else took, spread)
        self.freed()
