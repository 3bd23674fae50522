"""How much one engine computes at once, and what memory and context that leaves: the values of sizing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.domain import Choice, Memory, Scalar

# A context that serves most chats and agents. Of plans that all load, a plan with a shorter context ranks behind a plan with this
# context. Only a preference: `min_context` is the user's hard limit.
COMFORTABLE_CONTEXT = 32768


@dataclass(frozen=True)
class Batch:
    """Requests and tokens computed at once; `eager`: without CUDA graphs."""

    seqs: Choice[int]
    tokens: Choice[int]
    eager: Choice[bool]


@dataclass(frozen=True)
class Sizes:
    """`flags` tell the engine its budget; `scope` is where facts about these sizes hold."""

    batch: Batch
    memory: Memory
    context: Choice[int]
    flags: dict[str, Scalar]
    scope: dict[str, str]
    warnings: tuple[str, ...]
