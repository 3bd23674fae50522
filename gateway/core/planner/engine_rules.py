"""What is known of how one engine version computes: its rule files, by what they decide."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.attention.sglang_rules import BackendRules
from gateway.core.attention.vllm_rules import AttentionRules
from gateway.core.kernels.expert_kernels import MoeRules
from gateway.core.kernels.linear import LinearRules
from gateway.core.memory.sglang_memory import MemoryRules
from gateway.core.speculative.speculative import SpeculativeRules


@dataclass(frozen=True, eq=False)  # compared by identity: answers are remembered for each
class Rules:
    """The files of profiles/engines/KIND/VERSION/, each of which may be missing: then what it decides is not known."""

    linear: LinearRules | None = None
    moe: MoeRules | None = None
    attention: AttentionRules | None = None
    attention_backends: BackendRules | None = None
    speculative: SpeculativeRules | None = None
    memory: MemoryRules | None = None
