"""The band of starts on another machine, where this machine has no record of a start alike. Pure.

The starts are those of tests/logs/healthy-*: vLLM 0.26.0 on NVIDIA H200, 21 November 2026. The
weights of these starts were made up in memory, so the phase `load` says nothing and is left out.
"""

from __future__ import annotations

from gateway.diagnosis.start_times import median
from gateway.domain import Plan, StartConditions, StartTime

_ENGINE = "vllm"
_MAX_GPUS = 2
STARTS: dict[str, dict[str, float]] = {
    "granite-4.0-h-micro": {"import": 35, "profile": 4, "compile": 77, "graphs": 13, "kv": 12},
    "llama-3.1-8b-tp2": {"import": 34, "profile": 6, "compile": 13, "kv": 10, "graphs": 11},
    "qwen3-embedding-0.6b": {"import": 18, "profile": 6, "compile": 15, "graphs": 8, "kv": 9},
    "qwen3.5-9b": {"import": 41, "profile": 9, "compile": 50, "graphs": 19, "kv": 13},
}
"""Seconds of each phase, by the name of the log."""


def start_elsewhere(plan: Plan, conditions: StartConditions) -> StartTime | None:
    """The band of these starts, without the reading of weights; None: none is like this one.

    Forks skip the import, and none was measured with more than two GPUs.
    """
    is_like = plan.engine.kind == _ENGINE and 0 < len(plan.gpus) <= _MAX_GPUS
    if not is_like or conditions.origin == "fork":
        return None
    totals = [sum(phases.values()) for phases in STARTS.values()]
    names = next(iter(STARTS.values()))
    return StartTime(
        phases={name: median([phases[name] for phases in STARTS.values()]) for name in names},
        low_s=min(totals),
        high_s=max(totals),
        starts=len(totals),
        grade="elsewhere",
    )
