"""The start of a plan that an inquiry rehearses, and the meaning of its refusal for the plan.
Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain import EngineAnswer, Plan, StartSettings
from gateway.planner.flags import MEMORY_FLAGS

# Flags whose values are files, or settings that name files.
_FILE_FLAGS = ("--chat-template=", "--speculative-", "--lora-", "--tokenizer-path=")
# The engine gives no reason for a crash: what to do.
_CRASH_HINT = (
    "The engine's code crashes there before it loads weights. Compare config.json with the"
    " published file, leave out options of your own, or allow another engine version (`--engine`)."
)
# Stages of a start whose refusals follow from the sizes of the plan.
_SIZE_STAGES = ("parser", "configuration", "", "cache", "graphs")
# Flags of memory: whether the cache holds a request and its states is known by the answer's bytes.
_MEMORY_PREFIXES = tuple(f"--{flag}=" for flag in MEMORY_FLAGS)
# Flags whose smaller values no engine refuses where it takes a larger one.
_LIMITS = {
    "--max-num-seqs",
    "--max-running-requests",
    "--max-model-len",
    "--context-length",
    "--cuda-graph-max-bs",
    "--cuda-graph-max-bs-decode",
    "--max-cudagraph-capture-size",
}


def build_start_settings(plan: Plan) -> StartSettings:
    """The start of the plan, as an inquiry can rehearse it: other files are not there."""
    argv = (word for word in plan.argv if not word.startswith(_FILE_FLAGS))
    return StartSettings(argv=tuple(sorted(argv)), kv_bytes=plan.memory.kv_bytes)


def start_refusal(plan: Plan, answer: EngineAnswer) -> str:
    """The engine's words, if it refuses the start of this plan; "".

    A refusal that follows from sizes counts only for the sizes of the plan, and so does a crash.
    """
    start = answer.start
    if start is None or not start.refused:
        return ""
    is_same_start = (
        start.settings is not None and start.settings.argv == build_start_settings(plan).argv
    )
    if (start.has_crashed or start.stage in _SIZE_STAGES) and not is_same_start:
        return ""
    return (
        f"{start.refused} at {start.location}. {_CRASH_HINT}"
        if start.has_crashed
        else start.refused
    )


def is_proven(plan: Plan, answer: EngineAnswer) -> bool:
    """Whether the rehearsed start stands for the start of this plan.

    A rehearsed start stands for the same settings and for smaller limits, unless it was refused for
    its sizes. An engine that rehearses nothing leaves nothing to prove.
    """
    start = answer.start
    if start is None or start.settings is None:
        return True
    limits, other_words = _settings(build_start_settings(plan).argv)
    max_values, other_settings = _settings(start.settings.argv)
    if start.refused:
        return (limits, other_words) == (max_values, other_settings)
    return other_words == other_settings and all(
        max_values.get(name, -1) >= limit for name, limit in limits.items()
    )


def missing_stages(plan: Plan, answer: EngineAnswer) -> tuple[str, ...]:
    """The stages of the plan's start that the engine's own code did not run through."""
    if answer.start is None:
        return ()
    files = dict.fromkeys(
        word.partition("=")[0] for word in plan.argv if word.startswith(_FILE_FLAGS)
    )
    later_stages = ("pipeline stages after the first",) if plan.pipeline_parallel.value > 1 else ()
    return (*answer.start.skipped_steps, *later_stages, *(f"{name}: its file" for name in files))


def _settings(argv: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """The limits of a command line, and the other flags but those of memory."""
    limits = {}
    other_words = []
    for word in argv:
        name, _, value = word.partition("=")
        if name in _LIMITS and value.isdecimal():
            limits[name] = int(value)
        elif not word.startswith(_MEMORY_PREFIXES):
            other_words.append(word)
    return limits, sorted(other_words)
