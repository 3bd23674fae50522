"""An engine that takes and measures memory of pretended GPUs as vLLM does of real ones, as a child
process.

    python -S memory_engine.py FOLDER TOTAL ARGUMENTS...

FOLDER has the use of the GPUs by all processes (pretended_gpus.py), and a line in `measured` for
each KV cache that was made. The memory of the engine follows from the model's config.json and its
flags. While there is a file `keeps` in FOLDER, its sleep gives nothing back. The order is that of
vLLM 0.26.0: a CUDA context, free memory compared with its share (v1/worker/utils.py:425), the
weights, a profile run, the check of that run and the rest for the KV cache
(v1/worker/gpu_worker.py:482 to 545) or the bytes that it was given (:462 to 480), the cache,
graphs. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tests.support.fake_engine import parse, run, say
    from tests.support.pretended_gpus import GIB, MIB, OutOfMemory, PretendedGpu
else:
    from fake_engine import parse, run, say
    from pretended_gpus import GIB, MIB, OutOfMemory, PretendedGpu

CONTEXT, GRAPHS, ACTIVATION, NON_TORCH = GIB // 2, GIB // 2, 192 * MIB, 192 * MIB
# How long each part takes, in seconds: so short that many starts can be played, and long enough
# that starts meet.
IMPORTS_S, LOADING_S, PROFILE_S, CAPTURE_S = 0.1, 0.15, 0.15, 0.1
SLEEP_S, WAKE_S = 0.1, 0.02
PIECES = 8


def weights_of(config: dict[str, Any]) -> int:
    """Bytes of a Llama in 16 bits."""
    hidden_size = config["hidden_size"]
    inner = config["intermediate_size"]
    layers = config["num_hidden_layers"]
    kv_width = hidden_size * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = 2 * hidden_size * hidden_size + 2 * hidden_size * kv_width + 3 * hidden_size * inner
    return int(2 * (layers * layer + 2 * config["vocab_size"] * hidden_size))


def per_token(config: dict[str, Any]) -> int:
    """Bytes of KV cache for one token."""
    head = config["hidden_size"] // config["num_attention_heads"]
    return int(4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head)


def cache_alone(config: dict[str, Any], total: int, share: float) -> int:
    """Bytes that remain for the KV cache if no process disturbs the engine."""
    return int(math.ceil(total * share) - weights_of(config) - ACTIVATION - NON_TORCH)


def gib(count: int) -> str:
    return f"{count / GIB:.2f}"


def fail(text: str) -> NoReturn:
    say("(EngineCore pid=1) ERROR 06-18 03:13:53 [core.py:1100] EngineCore failed to start.")
    say("(EngineCore pid=1) ERROR 06-18 03:13:53 [core.py:1100] Traceback (most recent call last):")
    say(f"(EngineCore pid=1) ERROR 06-18 03:13:53 [core.py:1100] {text}")
    sys.exit(1)


def info(text: str) -> None:
    say(f"(EngineCore pid=1) INFO 06-18 03:13:53 [gpu_worker.py:560] {text}")


def start(
    folder: Path, total: int, flags: dict[str, str], config: dict[str, Any]
) -> Callable[[int | None], float]:
    """The function that puts the engine to sleep and wakes it. It returns the seconds."""
    gpu = PretendedGpu(folder, os.environ["CUDA_VISIBLE_DEVICES"], total)
    share, context = float(flags.get("gpu-memory-utilization", "0.92")), int(flags["max-model-len"])
    wait(IMPORTS_S)
    gpu.take(CONTEXT)
    # The snapshot is taken with the context there.
    before, budget = gpu.free, math.ceil(total * share)
    if before < budget:
        fail(
            f"ValueError: Free memory on device cuda:0 ({gib(before)}/{gib(total)} GiB) on startup"
            f" is less than desired GPU memory utilization ({share}, {gib(budget)} GiB)."
            " Decrease GPU memory utilization or reduce GPU memory used by other processes."
        )
    info("Starting to load model m...")
    weights = weights_of(config)
    for _ in range(PIECES):
        gpu.take(weights // PIECES)
        wait(LOADING_S / PIECES)
    torch = weights // PIECES * PIECES
    info(f"Model loading took {gib(weights)} GiB and 0.15 seconds")
    gpu.take(NON_TORCH)
    gpu.take(ACTIVATION)
    wait(PROFILE_S)
    gpu.take(-ACTIVATION)
    after, cache_bytes = gpu.free, int(flags.get("kv-cache-memory-bytes", "0"))
    if before < after and not cache_bytes:
        fail(
            f"AssertionError: Error in memory profiling. Initial free memory {gib(before)} GiB,"
            f" current free memory {gib(after)} GiB."
        )
    cache = cache_bytes or budget - (before - after - torch) - ACTIVATION - torch
    if cache_bytes:
        info(
            f"Initial free memory {gib(before)} GiB, reserved {gib(cache)} GiB memory for KV Cache"
            " as specified by kv_cache_memory_bytes config"
        )
    else:
        info(f"Available KV cache memory: {gib(cache)} GiB")
    if cache <= 0:
        fail(
            "ValueError: No available memory for the cache blocks. Try increasing"
            " `gpu_memory_utilization` when initializing the engine."
        )
    if cache < context * per_token(config):
        fail(
            f"ValueError: To serve at least one request with the model's max seq len ({context}),"
            f" ({gib(context * per_token(config))} GiB KV cache is needed, which is larger than the"
            f" available KV cache memory ({gib(cache)} GiB). Based on the available memory, the"
            f" estimated maximum model length is {cache // per_token(config)}."
        )
    info(f"GPU KV cache size: {cache // per_token(config):,} tokens")
    gpu.take(cache)
    lone_bytes = cache_alone(config, total, share)
    report = {
        "model": flags["served-model-name"],
        "pid": os.getpid(),
        "bytes": cache,
        "alone": lone_bytes,
        "sized": bool(cache_bytes),
    }
    report["beside"] = math.ceil(total * share) - lone_bytes
    with (folder / "measured").open("a") as file:
        file.write(json.dumps(report) + "\n")
    say("Capturing CUDA graphs (decode, FULL): 100%|##########| 51/51 [00:00<00:00, 185.04it/s]")
    wait(CAPTURE_S)
    gpu.take(GRAPHS)
    info("init engine (profile, create kv cache, warmup model) took 0.50 s")
    pool = torch + cache

    def sleep(level: int | None) -> float:
        if (folder / "keeps").exists():
            return SLEEP_S
        try:
            gpu.take(-pool if level else pool)
        except OutOfMemory as error:
            # cumem's create_and_map fails in the worker, and with it the engine.
            say(
                "(EngineCore pid=1) ERROR 06-18 03:13:53 [core.py:1100] RuntimeError: CUDA Error:"
                f" out of memory ({gib(error.tried)} GiB)"
            )
            os._exit(1)
        return SLEEP_S if level else WAKE_S

    return sleep


def wait(seconds: float) -> None:
    time.sleep(random.uniform(0.5, 1.5) * seconds)


def main() -> int:
    folder, total, *argv = sys.argv[1:]
    flags = dict(
        item.removeprefix("--").partition("=")[::2] for item in argv if item.startswith("--")
    )
    config = json.loads((Path(flags["model"]) / "config.json").read_text())
    try:
        sleep = start(Path(folder), int(total), flags, config)
    except OutOfMemory as error:
        fail(
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {gib(error.tried)} GiB."
            f" GPU 0 has a total capacity of {gib(int(total))} GiB of which {gib(error.free)} GiB"
            " is free. Including non-PyTorch memory, this process has 1.00 GiB memory in use."
        )
    script, host, port = parse(argv)
    behind = "middleware" in flags
    if ("VLLM_SERVER_DEV_MODE" in os.environ) != behind or behind != ("enable-sleep-mode" in flags):
        fail("its endpoints for development are open, and it has no door")
    script = replace(
        script,
        lines=((0, "INFO:     Application startup complete."),),
        sleeps=sleep if behind else None,
        door=behind,
    )
    return asyncio.run(run(script, host, port))


if __name__ == "__main__":
    sys.exit(main())
