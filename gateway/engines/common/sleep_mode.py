"""Whether an engine is made so that it can be put to sleep. Pure.

vLLM's level 1 copies the weights into pinned RAM; the KV cache goes, and comes back empty
(vllm/device_allocator/cumem.py). Level 2 drops the weights, and /wake_up alone does not bring them
back: it is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
    obstacle = _start_obstacle(engine, args, env, has_adapters=has_adapters)
    if obstacle is None and (
        (fact := next(facts.holding("sleep_fails", sleep_scope(scope)), None)) is not None
    ):
        obstacle = _Obstacle(f"it failed here: {fact.source}", "fact")
    obstacle = obstacle or _ram_obstacle(memory.weights_bytes * ranks, ram_bytes)
    if obstacle is not None:
        return BoolChoice(value=False, reason=obstacle.reason, source=obstacle.source)
    reason = f"{leaves}; from sleep it comes back in seconds"
    return BoolChoice(value=True, reason=reason, source=source)


class _Obstacle(NamedTuple):
    """The reason against sleep, and its source."""

    reason: str
    source: str


def _start_obstacle(
    engine: Engine, args: Mapping[str, Scalar], env: Mapping[str, str], *, has_adapters: bool
) -> _Obstacle | None:
    """The first reason against sleep in the engine version and its start."""
    profile = f"profile {engine.ref}"
    if FLAG not in engine.flags or not engine.has_sleep_mode:
        return _Obstacle(f"{engine.ref} has no sleep mode that gives memory back", profile)
    if has_adapters:
        return _Obstacle("untested with LoRA adapters", "planner")
    if offloading := [name for name in args if name.startswith(_OFFLOAD_FLAGS)]:
        return _Obstacle(f"untested with --{offloading[0]}", "planner")
    if any(_SEGMENTS in value for value in env.values()):
        return _Obstacle(f"its memory pool does not go with {_SEGMENTS}", profile)
    return None


def _ram_obstacle(weights_bytes: int, ram_bytes: int) -> _Obstacle | None:
    """The reason against sleep if the weights of all ranks do not fit into RAM."""
    if weights_bytes + reserved_ram_bytes(ram_bytes) <= ram_bytes:
        return None
    reason = (
        f"asleep its weights would take {gib(weights_bytes)} of RAM, and the machine has"
        f" {gib(ram_bytes)}"
    )
    return _Obstacle(reason, "memory model")
