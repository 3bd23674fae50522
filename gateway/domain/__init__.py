"""The values that all rooms exchange. All frozen.

Sizes are bytes, lengths are tokens, times are Unix seconds.

probe -> Hardware, catalog -> ModelSpec, user -> Wish, store -> Fact   into the planner
Plan -> LaunchSpec -> Instance (run by a host) and Attempt (our record of it)
Observation -> Failure -> Fact                                         back into the planner

A module is loaded when one of its names is first used: its classes take as long to make as a plan.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.domain.answer import (
        AskedAttention,
        AskedCache,
        AskedKernel,
        EngineAnswer,
        InquiryResult,
        RehearsedStart,
        ResolvedSettings,
    )
    from gateway.domain.choice import (
        BoolChoice,
        Choice,
        IntChoice,
        NumberChoice,
        StrChoice,
        bool_choice,
        int_choice,
        number_choice,
        str_choice,
    )
    from gateway.domain.decision import (
        Decision,
        EngineAvailability,
        FitAdvice,
        ModelForm,
        OpenQuestions,
        RejectedPlan,
        Rival,
        RuleGap,
    )
    from gateway.domain.engine import (
        Advisory,
        CacheDefault,
        Engine,
        Flag,
        Install,
        KnownChoice,
        Method,
        MethodRule,
    )
    from gateway.domain.facts import Fact, FactKind, Failure, TrafficSums
    from gateway.domain.hardware import (
        Cluster,
        Gpu,
        GpuProcess,
        Hardware,
        Link,
        Network,
        Node,
        NodeLink,
        Pcie,
        RdmaPort,
    )
    from gateway.domain.model import (
        Adapter,
        AdapterLayer,
        AttentionGroup,
        Experts,
        ModelSpec,
        Quant,
        QuantPlace,
        Recurrent,
        Shard,
        TensorGroup,
    )
    from gateway.domain.plan import (
        AdapterRef,
        Cap,
        Estimate,
        LayerAttention,
        LayerKernel,
        Memory,
        ModelRef,
        NodeRanks,
        Plan,
        Question,
        Refusal,
        Speed,
        StartSettings,
    )
    from gateway.domain.running import (
        Abilities,
        Ability,
        Attempt,
        AttemptState,
        Bench,
        BenchLevel,
        BenchReport,
        EngineProcess,
        Instance,
        LaunchSpec,
        MachineView,
        Mount,
        NodeLaunch,
        NodeView,
        Observation,
        SleepState,
        StoredBench,
    )
    from gateway.domain.sharing import Offer, Promise, Sharing
    from gateway.domain.start import (
        ExpectedStart,
        MeasuredStart,
        PreparedView,
        StartConditions,
        StartOrigin,
        StartTime,
    )
    from gateway.domain.value import MAX_BYTES, EngineRef, Grade, Scalar, Task, Value
    from gateway.domain.wish import NAME_PATTERN, Change, ChatTemplate, Policy, Wish

# Module: its names here.
_NAMES = {
    "answer": (
        "AskedAttention AskedCache AskedKernel EngineAnswer InquiryResult RehearsedStart "
        "ResolvedSettings"
    ),
    "choice": (
        "BoolChoice Choice IntChoice NumberChoice StrChoice bool_choice int_choice number_choice"
        " str_choice"
    ),
    "decision": (
        "Decision EngineAvailability FitAdvice ModelForm OpenQuestions RejectedPlan Rival RuleGap"
    ),
    "engine": "Advisory CacheDefault Engine Flag Install KnownChoice Method MethodRule",
    "facts": "Fact FactKind Failure TrafficSums",
    "hardware": "Cluster Gpu GpuProcess Hardware Link Network Node NodeLink Pcie RdmaPort",
    "model": (
        "Adapter AdapterLayer AttentionGroup Experts ModelSpec Quant QuantPlace Recurrent "
        "Shard TensorGroup"
    ),
    "plan": (
        "AdapterRef Cap Estimate LayerAttention LayerKernel Memory ModelRef NodeRanks "
        "Plan Question Refusal Speed StartSettings"
    ),
    "running": (
        "Abilities Ability SleepState Attempt AttemptState Bench StoredBench BenchLevel "
        "BenchReport EngineProcess Instance LaunchSpec MachineView Mount NodeLaunch NodeView "
        "Observation"
    ),
    "sharing": "Offer Promise Sharing",
    "start": "ExpectedStart MeasuredStart PreparedView StartConditions StartOrigin StartTime",
    "value": "MAX_BYTES EngineRef Grade Scalar Task Value",
    "wish": "NAME_PATTERN Change ChatTemplate Policy Wish",
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "MAX_BYTES",
    "NAME_PATTERN",
    "Abilities",
    "Ability",
    "Adapter",
    "AdapterLayer",
    "AdapterRef",
    "Advisory",
    "AskedAttention",
    "AskedCache",
    "AskedKernel",
    "Attempt",
    "AttemptState",
    "AttentionGroup",
    "Bench",
    "BenchLevel",
    "BenchReport",
    "BoolChoice",
    "CacheDefault",
    "Cap",
    "Change",
    "ChatTemplate",
    "Choice",
    "Cluster",
    "Decision",
    "Engine",
    "EngineAnswer",
    "EngineAvailability",
    "EngineProcess",
    "EngineRef",
    "Estimate",
    "ExpectedStart",
    "Experts",
    "Fact",
    "FactKind",
    "Failure",
    "FitAdvice",
    "Flag",
    "Gpu",
    "GpuProcess",
    "Grade",
    "Hardware",
    "InquiryResult",
    "Install",
    "Instance",
    "IntChoice",
    "KnownChoice",
    "LaunchSpec",
    "LayerAttention",
    "LayerKernel",
    "Link",
    "MachineView",
    "MeasuredStart",
    "Memory",
    "Method",
    "MethodRule",
    "ModelForm",
    "ModelRef",
    "ModelSpec",
    "Mount",
    "Network",
    "Node",
    "NodeLaunch",
    "NodeLink",
    "NodeRanks",
    "NodeView",
    "NumberChoice",
    "Observation",
    "Offer",
    "OpenQuestions",
    "Pcie",
    "Plan",
    "Policy",
    "PreparedView",
    "Promise",
    "Quant",
    "QuantPlace",
    "Question",
    "RdmaPort",
    "Recurrent",
    "Refusal",
    "RehearsedStart",
    "RejectedPlan",
    "ResolvedSettings",
    "Rival",
    "RuleGap",
    "Scalar",
    "Shard",
    "Sharing",
    "SleepState",
    "Speed",
    "StartConditions",
    "StartOrigin",
    "StartSettings",
    "StartTime",
    "StoredBench",
    "StrChoice",
    "Task",
    "TensorGroup",
    "TrafficSums",
    "Value",
    "Wish",
    "bool_choice",
    "int_choice",
    "number_choice",
    "str_choice",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"gateway.domain has no {name}")
    value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
