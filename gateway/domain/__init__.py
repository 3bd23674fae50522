"""The values everything speaks in. All frozen; sizes are bytes, lengths are tokens, times are Unix seconds.

probe -> Hardware, catalog -> ModelSpec, user -> Wish, store -> Fact   into the planner
Plan -> LaunchSpec -> Instance (what a host runs) and Attempt (what we remember of it)
Observation -> Failure -> Fact                                         back into the planner
"""

from __future__ import annotations

from gateway.domain.answer import Asked, AskedAttention, AskedCache, AskedKernel, EngineAnswer, Settled
from gateway.domain.engine import Advisory, Engine, Flag, Install, Method, MethodRule
from gateway.domain.facts import Fact, FactKind, Failure
from gateway.domain.hardware import Gpu, GpuProcess, Hardware, Link, Pcie
from gateway.domain.model import AttentionGroup, Experts, ModelSpec, Quant, Recurrent, Shard, TensorGroup
from gateway.domain.plan import (
    BoolChoice,
    Choice,
    Decision,
    Estimate,
    IntChoice,
    LayerAttention,
    LayerKernel,
    Memory,
    ModelRef,
    OpenQuestions,
    Plan,
    Planned,
    Question,
    Refusal,
    Rejected,
    Rival,
    RuleGap,
    RunningPlan,
    Speed,
    StrChoice,
)
from gateway.domain.running import (
    Attempt,
    AttemptState,
    Bench,
    BenchKept,
    BenchLevel,
    BenchReport,
    Instance,
    LaunchSpec,
    Mount,
    Observation,
)
from gateway.domain.value import MOST_BYTES, EngineRef, Grade, Scalar, Task, Value
from gateway.domain.wish import NAME_PATTERN, Policy, Wish

__all__ = [
    "MOST_BYTES",
    "NAME_PATTERN",
    "Advisory",
    "Asked",
    "AskedAttention",
    "AskedCache",
    "AskedKernel",
    "Attempt",
    "AttemptState",
    "AttentionGroup",
    "Bench",
    "BenchKept",
    "BenchLevel",
    "BenchReport",
    "BoolChoice",
    "Choice",
    "Decision",
    "Engine",
    "EngineAnswer",
    "EngineRef",
    "Estimate",
    "Experts",
    "Fact",
    "FactKind",
    "Failure",
    "Flag",
    "Gpu",
    "GpuProcess",
    "Grade",
    "Hardware",
    "Install",
    "Instance",
    "IntChoice",
    "LaunchSpec",
    "LayerAttention",
    "LayerKernel",
    "Link",
    "Memory",
    "Method",
    "MethodRule",
    "ModelRef",
    "ModelSpec",
    "Mount",
    "Observation",
    "OpenQuestions",
    "Pcie",
    "Plan",
    "Planned",
    "Policy",
    "Quant",
    "Question",
    "Recurrent",
    "Refusal",
    "Rejected",
    "Rival",
    "RuleGap",
    "RunningPlan",
    "Scalar",
    "Settled",
    "Shard",
    "Speed",
    "StrChoice",
    "Task",
    "TensorGroup",
    "Value",
    "Wish",
]
