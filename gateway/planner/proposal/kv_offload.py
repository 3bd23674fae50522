"""Whether an engine keeps a second KV cache in RAM, for conversations that return. Pure.

The engine copies every block that it computes into RAM, so RAM holds all blocks of the GPU's cache
and older ones. The time to bring a prompt's cache back, relative to the time to compute it, decides
twice: about the gain of a return, and about the part of the link that the copies take from plain
requests.
"""

from __future__ import annotations

from gateway.domain import Choice, Memory, Speed, number_choice
from gateway.domain.choice import NOT_FOR_AGENTS
from gateway.domain.plan import RAM
from gateway.domain.units import GIB, gib
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.planning_input import available_ram
from gateway.engines.common.resources import OFFLOAD_FLAG, reserved_ram_bytes
from gateway.engines.common.speed.machine import read_pcie_bytes_s

_PROMPT_TOKENS = 32768
# Measured on an H200 with vLLM 0.26.0 and Llama 3.1 8B (benchmarks/notebook/performance.md, "A KV
# cache in RAM"): the part of the link's bytes/s, and the seconds of a return in addition to the
# copy. The copy took 0.073 of the time of computing.
_LINK_PART = 0.76
_OVERHEAD_S = 0.06
_MAX_COPY_PART = 0.1
_LOSS_WORDS = "plain requests lost 1.4 % where that was measured (vLLM 0.26.0, one H200)"
# RAM for the engine's programs, and the part of the rest.
_PROGRAM_BYTES = 16 * GIB
_RAM_PARTS = 2
_MAX_BYTES = 192 * GIB
# Less holds little but copies of the GPU's blocks.
_MIN_TIMES_CACHE = 1.5


def kv_offload(
    candidate: Candidate, memory: Memory, speed: Speed | None, copies: int, *, has_sleep_mode: bool
) -> Choice[int | float]:
    """GiB of RAM; 0: none.

    copies: the number of engines of this model on the machine.
    has_sleep_mode: whether it is made so that it can sleep.
    """
    if OFFLOAD_FLAG in candidate.args:
        size_gib = float(candidate.args[OFFLOAD_FLAG])
        whole_gib = int(size_gib) if size_gib.is_integer() else size_gib
        return number_choice(whole_gib, "set by the user", "user")
    if candidate.inputs.wish.goal != "agents":
        return number_choice(0, NOT_FOR_AGENTS, "planner")
    if reason := _offload_refusal(candidate, has_sleep_mode=has_sleep_mode):
        return number_choice(0, reason, f"profile {candidate.engine.ref}")
    link = read_pcie_bytes_s(candidate.gpus[0])
    if link is None or speed is None or not memory.kv_bytes_per_token:
        return number_choice(0, "the speed of the GPU or of its link is not known", "speed model")
    if (computing := speed.first_token_32k_s) is None:
        reason = f"the context is shorter than {_PROMPT_TOKENS:,} tokens"
        return number_choice(0, reason, "speed model")
    copy_s = _PROMPT_TOKENS * memory.kv_bytes_per_token / (link * _LINK_PART)
    gain = (
        f"{_PROMPT_TOKENS:,} tokens that return have their first token after"
        f" {copy_s + _OVERHEAD_S:.2f} s, recomputed after {computing.value:.2f} s"
    )
    if copy_s > _MAX_COPY_PART * computing.value:
        return number_choice(0, f"too little is gained by it: {gain}", "speed model")
    free_bytes, memory_name = _free_ram(candidate)
    offload_bytes = min(free_bytes // copies, _MAX_BYTES)
    if offload_bytes < _MIN_TIMES_CACHE * memory.kv_bytes:
        reason = (
            f"the machine has {gib(max(0, offload_bytes))} of {memory_name} for it, hardly more"
            " than copies"
            f" of the GPU's {gib(memory.kv_bytes)}"
        )
        return number_choice(0, reason, "memory model")
    return number_choice(offload_bytes // GIB, f"{gain}; {_LOSS_WORDS}", "speed model")


def _offload_refusal(candidate: Candidate, *, has_sleep_mode: bool) -> str:
    """Why the engine or this plan cannot have it, or has not been measured with it; "": neither."""
    engine = candidate.engine
    inputs = candidate.inputs
    kinds = {group.kind for group in candidate.built_model.attention}
    reasons = (
        (OFFLOAD_FLAG not in engine.flags, f"{engine.ref} has no flag --{OFFLOAD_FLAG}"),
        (engine.device != "cuda", "only an engine on NVIDIA GPUs was measured with it"),
        (len(candidate.gpus) != 1, "only an engine on one GPU was measured with it"),
        (candidate.has_unified_memory, "GPU and host share one memory"),
        (kinds != {"full"}, "only full attention in all layers was measured with it"),
        (bool(inputs.adapters), "untested with LoRA adapters"),
        (bool(candidate.speculation.config), "untested with speculative decoding"),
        (
            has_sleep_mode or bool(inputs.sharing.leave_reason),
            "untested with sleep or a model that leaves",
        ),
    )
    return next((objection for is_true, objection in reasons if is_true), "")


def _free_ram(candidate: Candidate) -> tuple[int, str]:
    """Bytes for the caches of all copies, and the name of the memory that bounds them.

    They are a part of the RAM that other programs and engines leave, within the shared memory that
    they lie in.
    """
    machine = candidate.inputs.hardware
    promised_bytes = candidate.inputs.promised_bytes
    free_bytes = (available_ram(machine, promised_bytes) - _PROGRAM_BYTES) // _RAM_PARTS
    if machine.shm_bytes is None:
        return free_bytes, "RAM"
    shared_bytes = machine.shm_bytes - reserved_ram_bytes(machine.shm_bytes)
    shared_bytes -= promised_bytes.get(RAM, 0)
    return min((free_bytes, "RAM"), (shared_bytes, "shared memory (/dev/shm)"))
