"""Whether an engine is made so that it can be put to sleep. Pure.

vLLM's level 1 copies the weights into pinned RAM; the KV cache goes, and comes back empty
(vllm/device_allocator/cumem.py). Level 2 drops the weights, and /wake_up alone does not bring them
back: it is not used.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.diagnosis.facts.sleep import sleep_scope
from gateway.domain import BoolChoice, Choice, Engine, Memory, Scalar
from gateway.domain.choice import NEVER_SLEEPS, NO_GPU_SLEEP
from gateway.domain.units import gib
from gateway.engines.common.resources import reserved_ram_bytes

FLAG = "enable-sleep-mode"
# The user's flags with which sleep is untested: they move weights or the KV cache themselves.
_OFFLOAD_FLAGS = ("cpu-offload", "offload", "kv-offloading")
_NO_SLEEP = BoolChoice(value=False, reason=NEVER_SLEEPS, source="planner")
_SEGMENTS = "expandable_segments:True"


def choose_sleep_mode(
    engine: Engine,
    leaves: str,
    args: Mapping[str, Scalar],
    env: Mapping[str, str],
    facts: KnownFacts,
    scope: Mapping[str, str],
    memory: Memory,
    ranks: int,
    ram_bytes: int,
    *,
    has_adapters: bool = False,
) -> Choice[bool]:
    """The choice of sleep mode.

    leaves: the reason that the model may leave its GPUs; "": none.
    scope: the scope of facts learned from the plan.
    ram_bytes: RAM of the host.
    """
    if engine.device == "cpu" and FLAG not in args:
        return BoolChoice(value=False, reason=NO_GPU_SLEEP, source="planner")
    if not leaves and FLAG not in args:
        return _NO_SLEEP
    source = f"profile {engine.ref}"
    if FLAG in args:
        return BoolChoice(
            value=bool(args[FLAG]) and engine.has_sleep_mode,
            reason="set by the user",
            source="user",
        )
    if FLAG not in engine.flags or not engine.has_sleep_mode:
        return BoolChoice(
            value=False,
            reason=f"{engine.ref} has no sleep mode that gives memory back",
            source=source,
        )
    if has_adapters:
        return BoolChoice(value=False, reason="untested with LoRA adapters", source="planner")
    if offloading := [name for name in args if name.startswith(_OFFLOAD_FLAGS)]:
        return BoolChoice(value=False, reason=f"untested with --{offloading[0]}", source="planner")
    if any(_SEGMENTS in value for value in env.values()):
        return BoolChoice(
            value=False, reason=f"its memory pool does not go with {_SEGMENTS}", source=source
        )
    if (fact := next(facts.holding("sleep_fails", sleep_scope(scope)), None)) is not None:
        return BoolChoice(value=False, reason=f"it failed here: {fact.source}", source="fact")
    needed_bytes = memory.weights_bytes * ranks
    if needed_bytes + reserved_ram_bytes(ram_bytes) > ram_bytes:
        reason = (
            f"asleep its weights would take {gib(needed_bytes)} of RAM, and the machine has"
            f" {gib(ram_bytes)}"
        )
        return BoolChoice(value=False, reason=reason, source="memory model")
    reason = f"{leaves}; from sleep it comes back in seconds"
    return BoolChoice(value=True, reason=reason, source=source)
