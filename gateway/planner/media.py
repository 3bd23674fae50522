"""Kinds of content that a model takes and a plan drops. Pure.

An engine that would open any URL of a request gets flags to refuse media. Such a plan needs the
user's
word: `text_only` of the wish, or these flags themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from gateway.domain import Engine, ModelSpec, Plan, Scalar
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.media_limits import media_limit
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.refusal import RefusalError
from gateway.models.media import read_media
from gateway.planner.flags import spell_flags


def gate_media(inputs: PlanningInput, engine: Engine, rules: EngineRules) -> None:
    """Refuse an engine version that would drop media which the user did not give up."""
    spec = inputs.spec
    named_flags = _flag_values(inputs.wish.args)
    media = _media(spec, rules)
    if not media or not engine.text_only:
        return
    source = engine.sources.get("text_only", f"profile {engine.ref}")
    opens = f"{engine.ref} opens local files that a request names as an image, video or sound"
    for flag, value in engine.text_only.items():
        if flag in named_flags and _normalize(named_flags[flag]) != _normalize(value):
            reason = (
                f"{opens}; without --arg {flag} and with --text-only this model is served as text"
                " only, and vLLM serves it with media"
            )
            raise RefusalError("unsafe_media", reason, source)
    if spec.task == "transcribe":
        raise RefusalError("unsafe_media", f"{opens}, and this model takes nothing else", source)
    if not inputs.wish.text_only and not engine.text_only.keys() <= named_flags.keys():
        reason = (
            f"it would serve text only, and this model also takes {_media_text(media)}: {opens};"
            " --text-only (text_only) accepts that"
        )
        raise RefusalError("text_only", reason, f"profile {engine.ref}")


def drop_media(inputs: PlanningInput, engine: Engine, rules: EngineRules, plan: Plan) -> Plan:
    """The plan with the media that it drops, and the flags that make its engine refuse them."""
    media = _media(inputs.spec, rules)
    named_flags = _flag_values(inputs.wish.args)
    missing_flags = {
        flag: value for flag, value in engine.text_only.items() if flag not in named_flags
    }
    drops = media if media and engine.text_only else _given_up(media, named_flags)
    if not drops:
        return plan
    plan = plan.evolve(
        drops=drops,
        model=plan.model.evolve(
            inputs=tuple(kind for kind in plan.model.inputs if kind not in drops)
        ),
    )
    if not engine.text_only or not missing_flags:
        return plan
    warning = (
        f"As text only: {engine.ref} opens local files that a request names as an image, video or"
        " sound, so its flags refuse media; vLLM serves this model with media."
    )
    return plan.evolve(
        argv=(*plan.argv, *spell_flags(engine, missing_flags)),
        verdict="degraded",
        warnings=(warning, *plan.warnings),
    )


def _media(spec: ModelSpec, rules: EngineRules) -> tuple[str, ...]:
    """The kinds of media that the model takes, by its files or by the engine's own code."""
    if media := read_media(spec.config):
        return media
    sees = any(group.kind == "vision" for group in spec.attention) or rules.takes_media(spec)
    return ("image",) if sees else ()


def _given_up(media: tuple[str, ...], named_flags: Mapping[str, Scalar]) -> tuple[str, ...]:
    """The kinds of media that flags of the user leave out."""
    return tuple(kind for kind in media if media_limit(named_flags, kind) == 0)


def _flag_values(args: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name.removeprefix("--").replace("_", "-"): value for name, value in args.items()}


def _media_text(media: tuple[str, ...]) -> str:
    return f"{', '.join(media[:-1])} and {media[-1]}" if len(media) > 1 else media[0]


def _normalize(value: Scalar | None) -> object:
    """The value in one form for users and profiles."""
    try:
        return json.loads(value.lower()) if isinstance(value, str) else value
    except ValueError:
        return value
