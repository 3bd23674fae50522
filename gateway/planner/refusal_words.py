"""Words for a model without a plan: the cause that counts, and a planned cure. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.domain import Decision, FitAdvice, Hardware, ModelForm, Promise, RejectedPlan
from gateway.domain.plan import RAM
from gateway.domain.units import gib, plural, sentence
from gateway.planner.layer_tables import rejection_lines

# Verdicts on layouts or versions, which say little where another layout or version got further.
_EARLY_VERDICTS = (
    "illegal_parallelism",
    "no_device",
    "driver_too_old",
    "unsupported_platform",
    "unsupported_architecture",
)
_MAX_HOLDERS = 4


def held_by(holders: Iterable[Promise], machine: Hardware) -> tuple[Promise, ...]:
    """The promises with the numbers of the GPUs, or RAM where there are none; the largest first."""
    numbers = {gpu.uuid: gpu.index for gpu in machine.gpus}
    sentences = []
    for holder in sorted(holders, key=lambda holder: -sum(holder.bytes_by_gpu.values())):
        parts = ", ".join(
            f"{gib(count)} of {'RAM' if uuid == RAM else f'GPU {numbers[uuid]}'}"
            for uuid, count in sorted(
                holder.bytes_by_gpu.items(), key=lambda item: numbers.get(item[0], 0)
            )
            if uuid in numbers or (uuid == RAM and not numbers)
        )
        sentences += [holder.evolve(words=f"{holder.model} holds {parts}")] if parts else []
    return tuple(sentences)


def cause(decision: Decision) -> str:
    """The refusal that counts, as a sentence: of the candidate that came nearest to a plan."""
    if not decision.rejected:
        return (
            "No engine for this model can be started here."
            if decision.engines
            else "No engine profile fits this machine."
        )
    nearest = min(decision.rejected, key=_distance)
    fit = decision.would_fit
    if nearest.verdict == "no_memory" and fit is not None and _exceeds_memory(fit):
        return _memory_sentence(fit, decision.hardware)
    reason = nearest.reasons[0]
    # The rejected plans list the refusal of each kernel; a list in one line hides the cause.
    is_list = len(rejection_lines(nearest)) > 1
    return sentence(reason.partition(": ")[0] if is_list else reason)


def _distance(refusal: RejectedPlan) -> int:
    """How far a candidate was from a plan: memory is counted last."""
    if refusal.verdict == "no_memory":
        return 0
    return 2 + _EARLY_VERDICTS.index(refusal.verdict) if refusal.verdict in _EARLY_VERDICTS else 1


def _exceeds_memory(fit: FitAdvice) -> bool:
    return bool(fit.weights_bytes) and fit.room_bytes < fit.weights_bytes


def _memory_sentence(fit: FitAdvice, hardware: str) -> str:
    empty = fit.room_empty_bytes
    empty_words = f", and {gib(empty)} without the other models" if empty is not None else ""
    return (
        f"The weights take {gib(fit.weights_bytes)}; at most {gib(fit.room_bytes)} fit"
        f" on {hardware}{empty_words}."
    )


def cure(decision: Decision) -> str:
    """The first change that gives a plan, as a sentence; "": none that was planned does."""
    if decision.plans:
        return ""
    fit = decision.would_fit
    if fit is not None and fit.change:
        return f"{fit.change}."
    if decision.holders:
        holders_text = "; ".join(promise.words for promise in decision.holders[:_MAX_HOLDERS])
        names = dict.fromkeys(promise.model for promise in decision.holders)
        stops = "; ".join(f"fitserve stop {name}" for name in names)
        advice = f"{holders_text}. Without that there is a plan: `{stops}`."
        pinned_model = next(
            (promise.model for promise in decision.holders if promise.is_pinned), ""
        )
        if not pinned_model:
            return advice
        return (
            f"{advice} `fitserve set {pinned_model} --no-pinned` lets {pinned_model} leave for"
            " others."
        )
    if fit is not None and fit.forms:
        return f"Take another form of the model: {_form_words(fit.forms[0])}."
    return ""


def refusal_lines(decision: Decision) -> list[str]:
    """The cause, the cure, and the forms of the model that fit."""
    first = cause(decision)
    fit = decision.would_fit
    advice = cure(decision)
    if not advice and fit is not None:
        advice = "No change that was planned gives a plan; `fitserve matrix` compares machines."
    lines = [line for line in (first, advice) if line]
    if fit is not None and len(fit.forms) > 1:
        lines += ["Forms of the model that fit, best first:"]
        lines += [f"  {_form_words(form)}" for form in fit.forms]
    return lines


def _form_words(form: ModelForm) -> str:
    device_words = f"on {plural(form.gpus, 'GPU')}" if form.gpus else "on the CPU"
    name = f"{form.source} ({form.quantization})" if form.source else form.quantization
    return (
        f"{name}: {gib(form.weights_bytes)}, {form.context:,} tokens of context,"
        f" {form.engine} {device_words}"
    )


def no_plan_reason(decision: Decision) -> str:
    """The cause and the cure in one line."""
    return " ".join(line for line in (cause(decision), cure(decision)) if line)
