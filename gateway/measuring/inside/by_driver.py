"""Copies within a GPU and between two, measured only with NVIDIA's driver through ctypes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from .timing import number, time_runs

_SMALL_COPY = 4096
_CHECKED_BYTES = 4 << 20
_ACCESS_ENABLED_CODE = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_uint64
_DEFAULT_STREAM = None


class DriverError(Exception):
    """A call of the driver failed."""


class DriverMeasurer:
    """Measures the GPU of one rank, and its link to another GPU."""

    def __init__(self, question: dict[str, Any], rank: int) -> None:
        self.question = question
        self.rank = rank
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.software = f"CUDA driver {version.value // 1000}.{version.value % 1000 // 10}"
        self.contexts: dict[int, Any] = {}
        self.use(rank)

    def call(self, name: str, *arguments: Any, fine: int = 0) -> None:
        """Call a function of libcuda. fine: a code other than 0 that is not an error.

        Raises DriverError.
        """
        code = getattr(self.library, name)(*arguments)
        if code not in (0, fine):
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            raise DriverError(
                f"{name}: {(text.value or b'error').decode(errors='replace')} ({code})"
            )

    def device(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        return device

    def use(self, index: int) -> Any:
        """The context of this GPU, made current."""
        if index not in self.contexts:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device(index))
            self.contexts[index] = context
        self.call("cuCtxSetCurrent", self.contexts[index])
        return self.contexts[index]

    def allocate(self, size: int) -> Any:
        """The address of new memory on the current GPU, filled with random bytes."""
        address = _POINTER()
        self.call("cuMemAlloc_v2", ctypes.byref(address), _SIZE(size))
        filled_bytes = min(size, 1 << 20)
        self.call("cuMemcpyHtoD_v2", address, os.urandom(filled_bytes), _SIZE(filled_bytes))
        while filled_bytes < size:
            size_left = min(filled_bytes, size - filled_bytes)
            self.call(
                "cuMemcpyDtoD_v2", _POINTER(address.value + filled_bytes), address, _SIZE(size_left)
            )
            filled_bytes += size_left
        return address

    def wait(self) -> None:
        self.call("cuCtxSynchronize")

    def single_gpu(self, group: list[int]) -> Iterator[dict[str, Any]]:
        """Bytes/s of memory: a copy within the GPU reads and writes each byte."""
        copy_bytes = self.question["copy_bytes"]
        source = self.allocate(copy_bytes)
        target = self.allocate(copy_bytes)
        time_s, spread = time_runs(
            lambda: self.call("cuMemcpyDtoD_v2", target, source, _SIZE(copy_bytes)),
            self.wait,
            self.question["sample_s"],
        )
        for memory in (source, target):
            self.call("cuMemFree_v2", memory)
        yield number("memory", [self.rank], 2 * copy_bytes / time_s, spread)

    def reduce(self, group: list[int]) -> Iterator[dict[str, Any]]:
        """The driver has no all-reduce."""
        yield from ()

    graphs = reduce

    def peers(self, pair: list[int]) -> Iterator[dict[str, Any]]:
        """Peer access, latency and bytes/s from the first GPU to the second; or its corruption."""
        if self.rank != pair[0]:
            return
        has_access = ctypes.c_int()
        self.call(
            "cuDeviceCanAccessPeer",
            ctypes.byref(has_access),
            self.device(pair[0]),
            self.device(pair[1]),
        )
        access = number("peer_access", pair, float(bool(has_access.value)), 0.0)
        with self._buffers(pair) as copy:
            if has_access.value:
                target_context = self.contexts[pair[1]]
                self.call("cuCtxEnablePeerAccess", target_context, 0, fine=_ACCESS_ENABLED_CODE)
            is_intact = copy.is_intact(min(self.question["copy_bytes"], _CHECKED_BYTES))
            yield access
            if is_intact:
                yield from self._copy_times(pair, copy)
            else:
                yield number("peer_broken", pair, float(bool(has_access.value)), 0.0)
                yield {"problem": f"a copy from GPU {pair[0]} to GPU {pair[1]} was corrupted"}

    def _copy_times(self, pair: list[int], copy: PeerCopy) -> Iterator[dict[str, Any]]:
        """The latency of a small copy, and bytes/s of a large one."""
        copy_bytes = self.question["copy_bytes"]
        sample_s = self.question["sample_s"]
        small_copy = partial(copy.run, min(copy_bytes, _SMALL_COPY))
        latency_s, spread = time_runs(small_copy, self.wait, sample_s)
        yield number("peer_latency", pair, latency_s, spread)
        time_s, spread = time_runs(partial(copy.run, copy_bytes), self.wait, sample_s)
        yield number("peer", pair, copy_bytes / time_s, spread)

    @contextmanager
    def _buffers(self, pair: list[int]) -> Iterator[PeerCopy]:
        """A copy between new memory of both GPUs, which is freed at the end."""
        copy_bytes = self.question["copy_bytes"]
        self.use(pair[1])
        target = self.allocate(copy_bytes)
        try:
            self.use(pair[0])
            source = self.allocate(copy_bytes)
            try:
                yield PeerCopy(self, pair, source, target)
            finally:
                self.call("cuMemFree_v2", source)
        finally:
            self.use(pair[1])
            self.call("cuMemFree_v2", target)
            self.use(pair[0])


class PeerCopy(NamedTuple):
    """A copy from memory of the first GPU of a pair, the current one, to memory of the second."""

    driver: DriverMeasurer
    pair: list[int]
    source: Any
    target: Any

    def run(self, size: int) -> None:
        """Start to copy `size` bytes."""
        contexts = self.driver.contexts
        self.driver.call(
            "cuMemcpyPeerAsync",
            self.target,
            contexts[self.pair[1]],
            self.source,
            contexts[self.pair[0]],
            _SIZE(size),
            _DEFAULT_STREAM,
        )

    def is_intact(self, size: int) -> bool:
        """Copy `size` bytes. Whether the second GPU then has those of the first."""
        self.run(size)
        self.driver.wait()
        sent_buffer = ctypes.create_string_buffer(size)
        received_buffer = ctypes.create_string_buffer(size)
        self.driver.call("cuMemcpyDtoH_v2", sent_buffer, self.source, _SIZE(size))
        self.driver.use(self.pair[1])
        self.driver.call("cuMemcpyDtoH_v2", received_buffer, self.target, _SIZE(size))
        self.driver.use(self.pair[0])
        return sent_buffer.raw == received_buffer.raw
