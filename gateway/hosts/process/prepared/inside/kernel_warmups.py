"""Warm-ups of an engine whose kernels several processes compile before the engine runs them.

The warm-up of DeepGEMM in vLLM makes one call after the other, and a call whose kernel is not in
the cache of files compiles it: 921 calls and 48 kernels of 3.6 s each for Qwen3-30B-A3B in FP8 on
an H200. Here the calls are recorded, other processes make them on empty tensors, and the warm-up
finds every kernel in the cache. Where that fails, the warm-up compiles as ever.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import selectors
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from .replacement import replace_function

COMPILER = Path(__file__).with_name("kernel_compiler.py")
SUCCESS_REPLY = b"."
"""The reply of COMPILER to a call that it made. Another byte: the call failed."""
FUNCTIONS = "vllm.utils.deep_gemm"
"""The module of the recorded functions."""
RECORDED_FUNCTIONS = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous")
CACHE = "DG_JIT_CACHE_DIR"
"""The variable with the folder of compiled kernels. FUNCTIONS sets it."""
CAPABILITY = 9
"""Major compute capability with kernels that depend only on the arguments of a call."""
CONTEXT_BYTES = 1024**3
"""GPU memory of a process before its first tensor, rounded up."""
HOST_BYTES = 2 * 1024**3
"""Memory of the machine that a process takes with PyTorch, the engine and a compiler."""
MEMINFO = Path("/proc/meminfo")
LIMIT_S = 300.0


def compile_side_by_side(names: Iterable[str]) -> None:
    """Let the kernels of each warm-up `MODULE:NAME` be compiled before it runs."""
    for name in names:
        replace_function(name, precompile_kernels)


def precompile_kernels(warmup: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """The warm-up, after its kernels are compiled."""

    def run(*arguments: Any, **options: Any) -> Any:
        mark = None
        try:
            mark = compile_kernels(lambda: warmup(*arguments, **options), module)
        except Exception:
            traceback.print_exc()
        answer = warmup(*arguments, **options)
        if mark is not None:
            # The warm-up has compiled all that the processes did not.
            with suppress(OSError):
                mark.touch()
        return answer

    return run


def compile_kernels(warm_up: Callable[[], Any], module: Any) -> Path | None:
    """Compile the kernels for the calls of `warm_up`, once for each list of calls and each cache.

    Several ranks of an engine share a cache. The first compiles, and the others wait for it. Where
    it fails, the others try nothing again. Returns the mark of a cache that has all kernels; None:
    this GPU or warm-up is not valid for other processes.
    """
    import torch

    major, minor = torch.cuda.get_device_capability()
    if major != CAPABILITY:
        return None
    calls = recorded_calls(warm_up, module)
    folder = Path(os.environ.get(CACHE, ""))
    if not calls or not folder.is_absolute():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(call) for call in calls]
    identity = json.dumps([torch.__version__, major, minor, *lines])
    mark = folder / f"compiled-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    # All ranks of an engine have its session.
    attempt = f"{mark.name} {os.getsid(0)}"
    with (folder / "compiling").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not mark.exists() and lock.read() != attempt:
            lock.truncate(0)
            lock.write(attempt)
            lock.flush()
            if compile_lines(lines, max(map(tensor_bytes, calls))):
                mark.touch()
    return mark


def compile_lines(lines: Sequence[str], call_bytes: int) -> bool:
    """Let processes make the calls of all lines. Returns whether they did.

    call_bytes: GPU memory that the tensors of a call take at most.
    """
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    count = min(
        len(os.sched_getaffinity(0)),
        free_bytes // (CONTEXT_BYTES + call_bytes) - 1,
        available_bytes() // HOST_BYTES - 1,
        len(lines),
    )
    if count < 2:
        return False
    start_s = time.monotonic()
    command = [sys.executable, str(COMPILER), FUNCTIONS, str(torch.cuda.current_device())]
    are_made = make_calls(command, [lines[index] for index in spread_order(len(lines))], count)
    deed = "compiled the kernels" if are_made else "could not compile all kernels"
    seconds = time.monotonic() - start_s
    print(f"{count} processes {deed} of {len(lines)} calls in {seconds:.1f} s.")  # noqa: T201
    return are_made


def available_bytes() -> int:
    """Memory that programs of this machine can still take; 0: Linux does not report it."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match is not None else 0


def recorded_calls(warm_up: Callable[[], Any], module: Any) -> list[dict[str, Any]]:
    """The calls of RECORDED_FUNCTIONS that `warm_up` makes, without their effect.

    The sets in which the module remembers finished work are restored afterwards.
    """
    calls: list[dict[str, Any]] = []

    def recorder(name: str) -> Callable[..., None]:
        def record(*arguments: Any, **options: Any) -> None:
            calls.append(
                {
                    "function": name,
                    "arguments": [description(value) for value in arguments],
                    "options": {key: description(value) for key, value in options.items()},
                }
            )

        return record

    globals_before = {
        name: set(value) if isinstance(value, set) else value
        for name, value in vars(module).items()
        if name in RECORDED_FUNCTIONS or isinstance(value, set)
    }
    for name in RECORDED_FUNCTIONS:
        if name in globals_before:
            setattr(module, name, recorder(name))
    try:
        warm_up()
    finally:
        for name, value in globals_before.items():
            setattr(module, name, value)
    return calls


def description(value: Any) -> Any:
    """A value of a call as JSON: a tensor as its shape, strides and type. Raises ValueError."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [description(item) for item in value]
    if hasattr(value, "untyped_storage"):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "strides": list(value.stride()), "dtype": dtype}
    raise ValueError(f"A call has a {type(value).__name__}, which cannot be recorded.")


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a floating-point tensor, at most."""
    if "float8" in dtype:
        return 1
    return 2 if "16" in dtype else 4


def tensor_bytes(call: dict[str, Any]) -> int:
    """GPU memory that the tensors of a call take, with four bytes for each element at most."""
    total = 0
    values = [call["arguments"], list(call["options"].values())]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            sizes = zip(value["shape"], value["strides"], strict=True)
            total += element_bytes(value["dtype"]) * (
                1 + sum((size - 1) * stride for size, stride in sizes)
            )
    return total


def spread_order(count: int) -> list[int]:
    """The numbers below `count`, each far from those before it.

    Neighbours in a warm-up often need the same kernel, which two processes would compile at the
    same time.
    """
    bits = max(count - 1, 1).bit_length()
    numbers = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in numbers if number < count]


def make_calls(command: Sequence[str], lines: Sequence[str], count: int) -> bool:
    """Give the lines to `count` processes, each the next one as it replies. Returns whether all are
    done.

    A process whose call fails gets no other: its CUDA may be broken, and since it fails immediately
    it would take the calls of all. command: of a process, without the descriptor for its replies.
    """
    end = time.monotonic() + LIMIT_S
    waiting_lines = iter(lines)
    reply_count = 0
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(count):
            process, replies = start_compiler(command)
            stack.callback(stop_compiler, process, replies)
            selector.register(replies, selectors.EVENT_READ, process)
            send_line(process, waiting_lines)
        while selector.get_map():
            events = selector.select(max(0.0, end - time.monotonic()))
            if not events:
                return False
            for key, _ in events:
                reply = os.read(key.fd, 1)
                reply_count += len(reply)
                if reply != SUCCESS_REPLY or not send_line(key.data, waiting_lines):
                    selector.unregister(key.fd)
    return reply_count == len(lines)


def start_compiler(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
    """A process, and the descriptor of its replies."""
    replies, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, str(writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writer],
        )
    except OSError:
        os.close(replies)
        raise
    finally:
        os.close(writer)
    return process, replies


def send_line(process: subprocess.Popen[bytes], waiting_lines: Iterable[str]) -> bool:
    """Send the next line. Returns whether there was one."""
    line = next(iter(waiting_lines), None)
    if line is None or process.stdin is None:
        return False
    with suppress(BrokenPipeError):
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
    return True


def stop_compiler(process: subprocess.Popen[bytes], replies: int) -> None:
    process.kill()
    process.communicate()
    os.close(replies)
