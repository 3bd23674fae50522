"""Limits of an engine on its machine other than GPUs: RAM, processes, shared memory. Pure.

The limits stop a leak or hostile code. A sound engine never reaches them: every term is the largest
observed or possible value. RAM that a plan cannot know of is not limited by the plan.
"""

from __future__ import annotations

import hashlib
import json

from gateway.domain import Engine, Hardware, Plan
from gateway.domain.units import GIB
from gateway.domain.value import MAX_BYTES

# The API server, compilers (each of 32 processes imports the engine), the cache of images.
_PROGRAM_BYTES = 16 * GIB
# RAM of each rank: Python, CUDA's context, and buffers that are pinned for copies.
_RANK_BYTES = 8 * GIB
# GiB of all ranks.
OFFLOAD_FLAG = "kv-offloading-size"
# Flags with such a part keep weights, KV cache or inputs in RAM, as much as they say or as there
# is.
_RAM_FLAG_PARTS = ("offload", "swap", "hicache", "cache-gb", "lmcache", "sleep", "cpu-")
# A compiler pool, and a BLAS thread for each core in each of its processes.
_PROGRAM_PIDS = 12288
_RANK_PIDS = 4096


# RAM of each rank once it has imported its code.
_IMPORTED_BYTES = 2 * GIB

# RAM that sleeping engines must leave free.
_MIN_FREE_RAM_BYTES = 2 * GIB
_RAM_LEFT_SHARE = 20


def reserved_ram_bytes(ram_bytes: int) -> int:
    """Bytes of RAM that sleeping engines leave to all other programs."""
    return max(_MIN_FREE_RAM_BYTES, ram_bytes // _RAM_LEFT_SHARE)


def rank_count(plan: Plan) -> int:
    groups = plan.data_parallel.value
    return plan.tensor_parallel.value * plan.pipeline_parallel.value * groups


def ranks_of_node(plan: Plan) -> int:
    """The ranks of an engine on one machine."""
    return rank_count(plan) // plan.span


def compile_cache_name(plan: Plan, engine: Engine, *, remote_code: bool) -> str:
    """The name of a cache of compiled kernels that engines share, within one image or environment;
    "" for an engine without one.

    Engines on GPUs of one kind share it if they run only the engine's code. Code of a repository
    could leave anything in the cache, so such a model has its own.
    """
    if not engine.caches:
        return ""
    code = [plan.model.source, plan.model.revision] if remote_code else None
    return hashlib.sha256(json.dumps([plan.scope.get("device"), code]).encode()).hexdigest()[:16]


def page_cache_bytes(plan: Plan, machine: Hardware) -> int:
    """Bytes of weights that may be brought into the page cache before the plan starts; 0: none.

    Memory stays free for other programs, for the programs of the engine, and for all that it takes
    of RAM: on a CPU, and where CPU and GPU share one memory.
    """
    unified = any(gpu.memory_kind == "unified" for gpu in machine.gpus if gpu.uuid in plan.gpus)
    in_ram = plan.memory.promised_bytes if unified or not plan.gpus else 0
    kept_bytes = (
        reserved_ram_bytes(machine.ram_total_bytes) + rank_count(plan) * _IMPORTED_BYTES + in_ram
    )
    return max(0, machine.ram_available_bytes - kept_bytes)


def shm_bytes(plan: Plan) -> int:
    """Ranks talk through it; vLLM's own images ask for --ipc=host or a large /dev/shm.

    A KV cache in RAM is a file there (vllm/v1/kv_offload/cpu/shared_offload_region.py of 0.26.0).
    """
    ranks_bytes = (2 + 2 * plan.tensor_parallel.value * plan.data_parallel.value) * GIB
    return ranks_bytes + _offloaded_bytes(plan)


def _offloaded_bytes(plan: Plan) -> int:
    begin = f"--{OFFLOAD_FLAG}="
    sizes = [item.removeprefix(begin) for item in plan.argv if item.startswith(begin)]
    return round(float(sizes[-1]) * GIB) if sizes else 0


def ram_limit_bytes(plan: Plan) -> int:
    """The RAM limit: a copy of all device memory, the weights again while they load, shared memory,
    and the programs.

    On a CPU, and with memory that CPU and GPU share, the first copy is the engine's own. Linux
    drops pages of read files before it ends a program.
    """
    if any(
        part in argument.partition("=")[0] for argument in plan.argv for part in _RAM_FLAG_PARTS
    ):
        return MAX_BYTES
    sizes = plan.memory
    on_devices = max(sizes.high, sizes.budget_bytes) + sizes.kv_bytes + sizes.weights_bytes
    return ranks_of_node(plan) * (on_devices + _RANK_BYTES) + shm_bytes(plan) + _PROGRAM_BYTES


def process_limit(plan: Plan) -> int:
    return _PROGRAM_PIDS + ranks_of_node(plan) * _RANK_PIDS
