"""The start of a plan that an inquiry rehearses, and what its refusal means for the plan. Pure."""

from __future__ import annotations

from gateway.domain import EngineAnswer, Plan, StartSettings

# Flags whose values are files, or settings that name files.
_OF_FILES = ("--chat-template=", "--speculative-", "--lora-", "--tokenizer-path=")
# Stages of a start whose refusals follow from the sizes of the plan.
_OF_SIZES = ("parser", "configuration", "", "cache", "graphs")


def start_of(plan: Plan) -> StartSettings:
    """The start of the plan, as an inquiry can rehearse it: other files are not there."""
    argv = (word for word in plan.argv if not word.startswith(_OF_FILES))
    return StartSettings(argv=tuple(sorted(argv)), kv_bytes=plan.memory.kv_bytes)


def start_refusal(plan: Plan, answer: EngineAnswer) -> str:
    """The engine's words, if it refuses the start of this plan; "".

    A refusal that follows from sizes counts only for the sizes of the plan.
    """
    start = answer.start
    if start is None or not start.refused:
        return ""
    same = start.asked is not None and start.asked.argv == start_of(plan).argv
    if start.stage in _OF_SIZES and not same:
        return ""
    return start.refused
