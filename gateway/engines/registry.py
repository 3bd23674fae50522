"""Registry of the engine kinds: a new kind is one folder and one line here."""

from __future__ import annotations

from typing import NamedTuple

from gateway.engines.common.kind import EngineKind
from gateway.engines.sglang.kind import SglangKind
from gateway.engines.vllm.kind import VllmCpuKind, VllmKind


class KindEntry(NamedTuple):
    """Conventions of a kind, and where its rules are (`module:class`).

    Only the planner loads the rules, so every other program starts without them.
    """

    kind: EngineKind
    rules: str


KINDS: dict[str, KindEntry] = {
    "vllm": KindEntry(VllmKind(), "gateway.engines.vllm.engine:VllmRules"),
    "vllm-cpu": KindEntry(VllmCpuKind(), "gateway.engines.vllm.engine:VllmCpuRules"),
    "sglang": KindEntry(SglangKind(), "gateway.engines.sglang.engine:SglangRules"),
}

# Only vLLM prints its version, so a log with a version and no other sign of its kind is vLLM's.
KIND_THAT_LOGS_ITS_VERSION = "vllm"


def entry(name: str) -> KindEntry:
    """The registry's line; an unregistered kind counts as a fork of vLLM."""
    return KINDS.get(name, KINDS["vllm"])


def engine_kind(name: str) -> EngineKind:
    """Conventions of the kind."""
    return entry(name).kind
