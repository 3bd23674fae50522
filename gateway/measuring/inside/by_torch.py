"""Copies, matrix products and all-reduces, measured with torch on a GPU or a CPU."""

from __future__ import annotations

import importlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from .timing import number, sample_times, time_runs

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

_GRAPH_LAUNCHES = 50
_SMALL_COPY = 4096
_CHECKED_BYTES = 4 << 20
_SMALL_REDUCE_BYTES = 1 << 20


class TorchMeasurer:
    def __init__(self, question: dict[str, Any], rank: int) -> None:
        self.question = question
        self.rank = rank
        self.cuda = question["device"] == "cuda"
        self.software = f"torch {torch.__version__}"
        self.device = self.torch_device(rank)
        if self.cuda:
            torch.cuda.set_device(self.device)
        torch.manual_seed(rank)
        self.groups: dict[tuple[int, ...], Any] = {}

    def torch_device(self, rank: int) -> Any:
        return torch.device("cuda", rank) if self.cuda else torch.device("cpu")

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def free_cache(self) -> None:
        if self.cuda:
            torch.cuda.empty_cache()

    # --- one GPU ---

    def single_gpu(self, group: list[int]) -> Iterator[dict[str, Any]]:
        for quantity, measure in (
            ("memory", self.memory),
            ("launch", self.launch),
            *self.products(),
        ):
            try:
                value, spread = measure()
                yield number(quantity, [self.rank], value, spread)
            except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
                yield {"problem": f"GPU {self.rank}, {quantity}: {error}"[:500]}
            self.free_cache()

    def memory(self) -> tuple[float, float]:
        """Bytes/s, counting reads and writes."""
        copy_bytes = self.question["copy_bytes"]
        source = torch.randint(-128, 127, (copy_bytes,), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        time_s, spread = time_runs(
            lambda: target.copy_(source), self.wait, self.question["sample_s"]
        )
        return 2 * copy_bytes / time_s, spread

    def launch(self) -> tuple[float, float]:
        """Seconds of Python for the launch of one short operation."""
        small_tensor = torch.zeros(256, device=self.device)
        return time_runs(lambda: small_tensor.add_(1), lambda: None, self.question["sample_s"])

    def products(self) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
        capability = torch.cuda.get_device_capability(self.device) if self.cuda else (0, 0)
        yield "float16" if self.cuda and capability < (8, 0) else "bfloat16", self.product_16_bits
        if not self.cuda or capability >= (7, 5):
            yield "int8", self.product_int8
        if capability >= (8, 9):
            yield "fp8", self.product_fp8

    def product_16_bits(self) -> tuple[float, float]:
        before_ampere = self.cuda and torch.cuda.get_device_capability(self.device) < (8, 0)
        dtype = torch.float16 if before_ampere else torch.bfloat16
        a, b, c = (self.random(dtype) for _ in range(3))
        return self.flops(lambda: torch.matmul(a, b, out=c))

    def product_int8(self) -> tuple[float, float]:
        a, b = (self.random(torch.int8) for _ in range(2))
        return self.flops(lambda: torch._int_mm(a, b.t()))

    def product_fp8(self) -> tuple[float, float]:
        a, b = (self.random(torch.bfloat16).to(torch.float8_e4m3fn) for _ in range(2))
        scale = torch.ones((), device=self.device)
        return self.flops(
            lambda: torch._scaled_mm(
                a,
                b.t(),
                scale_a=scale,
                scale_b=scale,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
        )

    def random(self, dtype: Any) -> Any:
        """A random matrix: zeros need less power, so the GPU would multiply them faster."""
        shape = (self.question["matmul"],) * 2
        if dtype == torch.int8:
            return torch.randint(-128, 127, shape, dtype=dtype, device=self.device)
        return torch.randn(shape, dtype=dtype, device=self.device)

    def flops(self, run: Callable[[], object]) -> tuple[float, float]:
        time_s, spread = time_runs(run, self.wait, self.question["sample_s"])
        return 2 * self.question["matmul"] ** 3 / time_s, spread

    # --- several GPUs ---

    def reduce(self, group: list[int]) -> Iterator[dict[str, Any]]:
        """Seconds of one all-reduce by size, measured by the first rank of the group."""
        ranks = self.process_group(group)
        if self.rank not in group:
            return
        for size in self.question["reduce_bytes"]:
            data = torch.ones(size // 4, dtype=torch.float32, device=self.device)
            dist.all_reduce(data, group=ranks)
            if not bool((data == len(group)).all()):
                raise RuntimeError(f"an all-reduce of {size} bytes gave wrong sums")
            data.zero_()
            time_s, spread = self.timed_together(partial(dist.all_reduce, data, group=ranks), ranks)
            if self.rank == group[0]:
                yield number("all_reduce", group, time_s, spread, bytes=size)

    def graphs(self, group: list[int]) -> Iterator[dict[str, Any]]:
        """Seconds of small all-reduces in a CUDA graph, without Python's launches, as in engines.

        A failed capture breaks the process, so this part comes last.
        """
        if not self.cuda or self.rank not in group:
            return
        ranks = self.process_group(group)
        for size in self.question["reduce_bytes"]:
            if size <= _SMALL_REDUCE_BYTES:
                data = torch.zeros(size // 4, dtype=torch.float32, device=self.device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    for _ in range(_GRAPH_LAUNCHES):
                        dist.all_reduce(data, group=ranks)
                time_s, spread = self.timed_together(graph.replay, ranks)
                if self.rank == group[0]:
                    yield number("all_reduce", group, time_s / _GRAPH_LAUNCHES, spread, bytes=size)

    def process_group(self, group: list[int]) -> Any:
        """The process group of these ranks. The ranks meet through a file, so no port is needed."""
        if not dist.is_initialized():
            store = f"file://{Path(tempfile.gettempdir())}/measuring-{os.getppid()}"
            dist.init_process_group(
                "nccl" if self.cuda else "gloo",
                init_method=store,
                rank=self.rank,
                world_size=self.question["count"],
            )
        if tuple(group) not in self.groups:
            self.groups[tuple(group)] = dist.new_group(group)
        return self.groups[tuple(group)]

    def timed_together(self, run: Callable[[], object], ranks: Any) -> tuple[float, float]:
        """The time of a run as `sample_times` has it, with as many runs on each rank."""
        for _ in range(5):
            run()
        time_s, _ = sample_times(run, self.wait, 1)
        count = torch.tensor(
            [max(1, math.ceil(self.question["sample_s"] / time_s))], device=self.device
        )
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=ranks)
        return sample_times(run, self.wait, int(count))

    def peers(self, pair: list[int]) -> Iterator[dict[str, Any]]:
        """Copies from one GPU to another, by the process of the first."""
        if self.rank != pair[0]:
            return
        source_device = self.torch_device(pair[0])
        target_device = self.torch_device(pair[1])
        is_accessible = not self.cuda or torch.cuda.can_device_access_peer(pair[0], pair[1])
        sent_tensor = torch.randint(
            -128, 127, (_CHECKED_BYTES,), dtype=torch.int8, device=source_device
        )
        received_tensor = torch.zeros_like(sent_tensor, device=target_device)
        received_tensor.copy_(sent_tensor)
        is_equal = torch.equal(sent_tensor.cpu(), received_tensor.cpu())
        yield number("peer_access", pair, float(is_accessible), 0.0)
        if not is_equal:
            yield number("peer_broken", pair, float(is_accessible), 0.0)
            yield {"problem": f"a copy from GPU {pair[0]} to GPU {pair[1]} was corrupted"}
            return
        for quantity, size in (
            ("peer_latency", _SMALL_COPY),
            ("peer", self.question["copy_bytes"]),
        ):
            source = torch.empty(size, dtype=torch.int8, device=source_device)
            target = torch.empty(size, dtype=torch.int8, device=target_device)

            def wait() -> None:
                for device in (source_device, target_device):
                    if self.cuda:
                        torch.cuda.synchronize(device)

            time_s, spread = time_runs(
                partial(target.copy_, source), wait, self.question["sample_s"]
            )
            yield number(quantity, pair, size / time_s if quantity == "peer" else time_s, spread)
        self.free_cache()
