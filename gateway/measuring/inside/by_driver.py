"""One rank measures by NVIDIA's driver alone, through ctypes: copies within a GPU and between two.
It multiplies nothing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from .timing import number, seconds

_SMALL_COPY = 4096
_CHECKED_BYTES = 4 << 20
_ACCESS_ALREADY = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_uint64


class DriverError(Exception):
    pass


class Body:
    def __init__(self, asked: dict[str, Any], rank: int) -> None:
        self.asked, self.rank = asked, rank
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.software = f"CUDA driver {version.value // 1000}.{version.value % 1000 // 10}"
        self.contexts: dict[int, Any] = {}
        self.use(rank)

    def call(self, name: str, *arguments: Any, fine: int = 0) -> None:
        code = getattr(self.library, name)(*arguments)
        if code not in (0, fine):
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            raise DriverError(
                f"{name}: {(text.value or b'error').decode(errors='replace')} ({code})"
            )

    def device(self, index: int) -> ctypes.c_int:
        found = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(found), index)
        return found

    def use(self, index: int) -> Any:
        if index not in self.contexts:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device(index))
            self.contexts[index] = context
        self.call("cuCtxSetCurrent", self.contexts[index])
        return self.contexts[index]

    def taken(self, size: int) -> Any:
        """Memory of the GPU in use, with bytes of all kinds in it."""
        found = _POINTER()
        self.call("cuMemAlloc_v2", ctypes.byref(found), _SIZE(size))
        done = min(size, 1 << 20)
        self.call("cuMemcpyHtoD_v2", found, os.urandom(done), _SIZE(done))
        while done < size:
            more = min(done, size - done)
            self.call("cuMemcpyDtoD_v2", _POINTER(found.value + done), found, _SIZE(more))
            done += more
        return found

    def wait(self) -> None:
        self.call("cuCtxSynchronize")

    def own(self, group: list[int]) -> Iterator[dict[str, Any]]:
        size = self.asked["copy_bytes"]
        source, target = self.taken(size), self.taken(size)
        took, spread = seconds(
            lambda: self.call("cuMemcpyDtoD_v2", target, source, _SIZE(size)),
            self.wait,
            self.asked["sample_s"],
        )
        for memory in (source, target):
            self.call("cuMemFree_v2", memory)
        yield number("memory", [self.rank], 2 * size / took, spread)

    def reduce(self, group: list[int]) -> Iterator[dict[str, Any]]:
        """The driver has no all-reduce."""
        yield from ()

    graphs = reduce

    def peers(self, pair: list[int]) -> Iterator[dict[str, Any]]:
        if self.rank != pair[0]:
            return
        can = ctypes.c_int()
        self.call(
            "cuDeviceCanAccessPeer", ctypes.byref(can), self.device(pair[0]), self.device(pair[1])
        )
        size = self.asked["copy_bytes"]
        there = self.use(pair[1])
        target = self.taken(size)
        here = self.use(pair[0])
        source = self.taken(size)
        if can.value:
            self.call("cuCtxEnablePeerAccess", there, 0, fine=_ACCESS_ALREADY)

        def copy(count: int) -> None:
            self.call("cuMemcpyPeerAsync", target, there, source, here, _SIZE(count), None)

        checked = min(size, _CHECKED_BYTES)
        copy(checked)
        self.wait()
        sent, got = ctypes.create_string_buffer(checked), ctypes.create_string_buffer(checked)
        self.call("cuMemcpyDtoH_v2", sent, source, _SIZE(checked))
        self.use(pair[1])
        self.call("cuMemcpyDtoH_v2", got, target, _SIZE(checked))
        self.use(pair[0])
        right = sent.raw == got.raw
        yield number("peer_access", pair, float(bool(can.value)), 0.0)
        if right:
            for what, count in (("peer_latency", min(size, _SMALL_COPY)), ("peer", size)):
                took, spread = seconds(partial(copy, count), self.wait, self.asked["sample_s"])
                yield number(what, pair, size / took if what == "peer" else took, spread)
        else:
            yield number("peer_broken", pair, float(bool(can.value)), 0.0)
            yield {"problem": f"what GPU {pair[0]} copied to GPU {pair[1]} arrived wrong"}
        self.call("cuMemFree_v2", source)
        self.use(pair[1])
        self.call("cuMemFree_v2", target)
        self.use(pair[0])
