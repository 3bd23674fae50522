"""How much of its machine an engine may take beside its GPUs: RAM, processes, shared memory. Pure.

The limits hold off what runs away: a leak, a hostile model's code. A sound engine never meets them,
so every term is the most that was seen or can be thought of, and what RAM is used in ways that a
plan does not know is not limited by the plan at all.
"""

from __future__ import annotations

import hashlib
import json

from gateway.domain import Plan
from gateway.domain.units import GIB
from gateway.domain.value import MOST_BYTES

# The API server, compilers (each of 32 processes imports the engine), the cache of images.
_PROGRAM_BYTES = 16 * GIB
# Of each rank: Python, CUDA's context, buffers that are pinned for copies.
_RANK_BYTES = 8 * GIB
# Flags with such a part keep weights, KV cache or inputs in RAM, as much as they say or as there
# is.
_IN_RAM = ("offload", "swap", "hicache", "cache-gb", "lmcache", "sleep", "cpu-")
# A compiler pool, and a BLAS thread for each core in each of its processes.
_PROGRAM_PIDS, _RANK_PIDS = 12288, 4096


# What stays free of a machine's RAM whatever sleeps there.
_RAM_LEFT, _RAM_LEFT_SHARE = 2 * GIB, 20


def ram_left(ram_bytes: int) -> int:
    """Of so much RAM, what engines that sleep leave to everybody else."""
    return max(_RAM_LEFT, ram_bytes // _RAM_LEFT_SHARE)


def ranks(plan: Plan) -> int:
    return plan.tensor_parallel.value * plan.pipeline_parallel.value


def cache(plan: Plan, *, remote_code: bool) -> str:
    """Who shares compiled kernels, within one image or environment: engines on GPUs of one kind
    that run the engine's code alone. Code of a
    repository could leave anything there for the next engine to run, so it has a cache for itself.
    """
    code = [plan.model.source, plan.model.revision] if remote_code else None
    return hashlib.sha256(json.dumps([plan.scope.get("device"), code]).encode()).hexdigest()[:16]


def shared_memory(plan: Plan) -> int:
    """Ranks talk through it; vLLM's own images ask for --ipc=host or a large /dev/shm."""
    return (2 + 2 * plan.tensor_parallel.value) * GIB


def memory(plan: Plan) -> int:
    """Everything that the engine has on its devices once more in RAM (on a CPU, and where CPU and
    GPU share memory, it is there),
    the weights yet again while they are read, shared memory, and its programs.

    Pages of files that are read count too, but Linux drops them before it ends anything.
    """
    if any(part in item.partition("=")[0] for item in plan.argv for part in _IN_RAM):
        return MOST_BYTES
    sizes = plan.memory
    on_devices = max(sizes.high, sizes.budget_bytes) + sizes.kv_bytes + sizes.weights_bytes
    return ranks(plan) * (on_devices + _RANK_BYTES) + shared_memory(plan) + _PROGRAM_BYTES


def pids(plan: Plan) -> int:
    return _PROGRAM_PIDS + ranks(plan) * _RANK_PIDS
