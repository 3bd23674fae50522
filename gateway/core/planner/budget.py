"""What an engine may take of each device, and how that is divided. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.core.facts.scope import holding
from gateway.core.memory import vllm_memory as mem
from gateway.core.memory.sglang_kv_cache import model_of
from gateway.core.memory.sglang_memory import MemoryRules, StaticMemory, fraction_within, static_memory
from gateway.core.memory.vllm_memory import Workload
from gateway.core.planner.candidate import Candidate
from gateway.core.planner.parallel import available_bytes
from gateway.domain import Memory, Scalar
from gateway.domain.units import GIB, MIB, gib
from gateway.errors import BadFlag

# Free bytes left alone on each GPU: what other processes and the driver may take between our look and the start.
_HEADROOM = 256 * MIB
# The part of its share that a conservative plan leaves free, because the plan that failed may have lacked it.
_CONSERVATIVE = 0.05
# A trait of engine versions: CUDA graphs are counted within the memory budget, not captured beside it.
GRAPHS_IN_BUDGET = "graphs_in_budget"


@dataclass(frozen=True)
class Budget:
    """Bytes per device, the flags that say so, and the same in `words` (also a fact's scope)."""

    bytes: int
    flags: dict[str, Scalar]
    words: str


def budget(candidate: Candidate, load: Workload, context: int) -> Budget:
    """`context`: tokens that a user would be content with, where nothing else bounds the KV cache (on a CPU)."""
    if candidate.engine.device == "cpu":
        return _of_ram(candidate, load, context)
    total = candidate.gpu_bytes
    if candidate.pools is not None:
        return _of_pools(candidate, candidate.pools, load)
    # The engine takes its share of what CUDA says the card has, which is less than NVML says.
    seen = min((total_bytes - mem.driver_bytes(gpu) for gpu in candidate.group if (total_bytes := gpu.total_bytes)), default=0)
    if "gpu-memory-utilization" in candidate.args:
        share = float(candidate.args["gpu-memory-utilization"])
        return Budget(round(seen * share), {}, f"utilization {share:.2f}, set by the user")
    most = (
        candidate.engine.default_utilization
        - _spared(candidate) / total
        - (_CONSERVATIVE if candidate.variant.conservative else 0)
    )
    counted = GRAPHS_IN_BUDGET in candidate.engine.traits
    room = _usable(candidate) - mem.beside_bytes(candidate.given.spec, candidate.stage, load, graphs_in_budget=counted)
    share = max(0.0, min(math.floor(most * 100) / 100, room * 100 // total / 100))
    return Budget(round(seen * share), {"gpu-memory-utilization": share}, f"utilization {share:.2f}")


def divided(candidate: Candidate, load: Workload, budget_bytes: int) -> Memory:
    """The Memory of one rank under a budget."""
    if candidate.pools is not None:
        return _pooled(candidate, candidate.pools, load, budget_bytes)
    return mem.memory(
        candidate.given.spec,
        candidate.stage,
        candidate.cache,
        load,
        weights_bytes=candidate.weights,
        device_bytes=candidate.gpu_bytes,
        budget_bytes=budget_bytes,
        graphs_in_budget=GRAPHS_IN_BUDGET in candidate.engine.traits,
    )


def _spared(candidate: Candidate) -> int:
    """Bytes that an engine turned out to need beside its share, when it ran out of memory while it served."""
    facts = holding(candidate.given.facts, "spare_memory", candidate.scope)
    return max((fact.value or 0 for fact in facts), default=0)


def _usable(candidate: Candidate) -> int:
    return min(available_bytes(gpu, candidate.given.claims) for gpu in candidate.group) - _HEADROOM


def _of_ram(candidate: Candidate, load: Workload, context: int) -> Budget:
    """Weights and activations, and a KV cache for four requests of the wanted length, within half of the RAM."""
    fixed = divided(candidate, load, 0)
    used = fixed.weights_bytes + fixed.activation_bytes + fixed.overhead_bytes
    wanted = 4 * candidate.cache.bytes_for(context, load.batched_tokens)
    if "kv-cache-memory-bytes" in candidate.args:
        kv = int(candidate.args["kv-cache-memory-bytes"])
    elif space := candidate.given.wish.env.get("VLLM_CPU_KVCACHE_SPACE"):
        if not space.isdecimal():
            raise BadFlag(
                f"VLLM_CPU_KVCACHE_SPACE is {space[:40]!r}; it is a whole number of GiB.", hint="Correct it.", param="env"
            )
        kv = int(space[:6]) * GIB
    else:
        spare = candidate.given.hardware.ram_total_bytes // 2 - used
        kv = _coarse(min(max(wanted, GIB // 4), spare)) if wanted else 0
    return Budget(used + kv, {}, f"{gib(kv)} of KV cache")


# --- SGLang: a share for weights and pools, and what it reserves for everything else ---


def _of_pools(candidate: Candidate, pools: MemoryRules, load: Workload) -> Budget:
    static = _static(candidate, pools, load)
    if "gpu-memory-utilization" in candidate.args:
        fraction = float(candidate.args["gpu-memory-utilization"])
    else:
        fraction = fraction_within(static, _usable(candidate), candidate.gpu_bytes)
    whole = int(candidate.gpu_bytes * fraction) + round(static.reserved_mib * MIB)
    return Budget(whole, {"gpu-memory-utilization": fraction}, f"static fraction {fraction:.3f}")


def _static(candidate: Candidate, pools: MemoryRules, load: Workload) -> StaticMemory:
    """What SGLang itself would choose on these GPUs."""
    return static_memory(
        pools,
        candidate.gpu_bytes / MIB,
        model_of(candidate.given.spec),
        tp=load.rank.tp,
        pp=load.rank.pp,
        seqs=load.seqs,
        chunked_prefill=load.batched_tokens,
        eager=not load.graphs,
    )


def _pooled(candidate: Candidate, pools: MemoryRules, load: Workload, budget_bytes: int) -> Memory:
    reserved = round(_static(candidate, pools, load).reserved_mib * MIB)
    held, per_token = candidate.weights, candidate.cache.bytes_per_token
    kv = max(0, budget_bytes - reserved - held)
    return Memory(
        gpu_bytes=candidate.gpu_bytes,
        budget_bytes=budget_bytes,
        weights_bytes=held,
        activation_bytes=reserved,
        graph_bytes=0,
        overhead_bytes=0,
        kv_bytes=kv,
        kv_bytes_per_token=per_token,
        kv_tokens=kv // per_token if per_token else 0,
        low=held + reserved // 2,
        high=held + held // 50 + reserved,
    )


def _coarse(count: int) -> int:
    """Down to a quarter of a GiB: a machine's RAM reads a little different after each boot, and facts must go on to hold."""
    return max(0, count // (GIB // 4)) * (GIB // 4)
