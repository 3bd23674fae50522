"""Numbers and forms of a model that would fit, if it has no plan.

Forms are quantized variants of the repository that the Hub lists, read and planned like any model.
Without a Hub they are shapes that would fit. Number and time of all reads are bounded.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gateway.domain import (
    Decision,
    FitAdvice,
    ModelForm,
    ModelSpec,
    Plan,
    Quant,
    RejectedPlan,
    Wish,
)
from gateway.domain.record import FrozenRecord
from gateway.domain.units import plural
from gateway.errors import FitserveError
from gateway.models.catalog.hub import REPOSITORY, Hub
from gateway.planner.overrides import CONFIG_FLAGS
from gateway.planner.sizes import shortcomings, wanted_context

if TYPE_CHECKING:
    from concurrent.futures import Future

# Variants that are read, seconds for all, concurrent reads, and forms that are shown.
_MAX_READ = 8
_LIMIT_S = 6.0
_MAX_READERS = 4
_MAX_ALTERNATIVES = 5
# Verdicts that no other form of the model cures.
_FORMLESS_VERDICTS = {
    "unsupported_architecture",
    "untrusted_code",
    "text_only",
    "unsafe_media",
    "driver_too_old",
    "unsupported_platform",
    "bad_flag",
}
# These are the forms that quantization tools write. The forms with the most bits come first.
_SHAPES: dict[str, dict[str, Any]] = {
    "FP8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "AWQ or GPTQ 4-bit": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    },
}
# Options of a wish that may exclude every plan, by the fields that they set.
_OPTIONS = {
    "--tp": ("tensor_parallel",),
    "--arg data-parallel-size": ("data_parallel",),
    "--gpus": ("gpus",),
    "--engine": ("engines",),
    "--replicas": ("replicas",),
    "--copies": ("copies",),
    "--dtype": ("dtype",),
    "--drafter": ("drafter", "num_speculative_tokens"),
    "--speculative": ("speculative", "num_speculative_tokens"),
    "--lora": ("loras",),
}
# Verdicts that no option of the wish cures.
_CURELESS_VERDICTS = {"unsupported_architecture", "driver_too_old", "unsupported_platform"}
# Model cards name no larger factor (Qwen2.5, Qwen3).
_MAX_YARN_FACTOR = 4
_BITS = {"fp8": 8, "awq": 4}
# Verdicts on a layout that no quantization changes.
_LAYOUT_VERDICTS = {"illegal_parallelism", "unsupported_architecture"}
_CONTEXT_FLAGS = {"max-model-len", "context-length"}


class UnplannedModel(FrozenRecord, frozen=True):
    """A model without a plan.

    decide: the decision for a form and a wish on this machine.
    decide_on_empty: the same without the memory of running engines; None: they have none.
    read: the spec of a repository.
    """

    spec: ModelSpec
    wish: Wish
    decide: Callable[[ModelSpec, Wish], Decision]
    read: Callable[[str], ModelSpec]
    decide_on_empty: Callable[[ModelSpec, Wish], Decision] | None = None


def add_alternatives(decision: Decision, unplanned_model: UnplannedModel, hub: Hub) -> Decision:
    """The decision with `would_fit`, if it has no plan and another form could help."""
    verdicts = {rejection.verdict for rejection in decision.rejected}
    if decision.plans or not verdicts - _CURELESS_VERDICTS:
        return decision
    shorter = _best_shorter_plan(unplanned_model)
    change = _missing_option(unplanned_model, shorter)
    if not verdicts - _FORMLESS_VERDICTS:
        fit = FitAdvice(weights_bytes=0, room_bytes=0, change=change)
        return decision.evolve(would_fit=fit) if change else decision
    unshared_decision = (
        unplanned_model.decide_on_empty(unplanned_model.spec, unplanned_model.wish)
        if unplanned_model.decide_on_empty is not None
        else None
    )
    forms = tuple(_best(_variants(unplanned_model, hub), unplanned_model)) or tuple(
        _best(_other_shapes(unplanned_model, decision), unplanned_model)
    )
    fit = FitAdvice(
        weights_bytes=_weights(decision),
        # Another form may take less memory besides its weights.
        room_bytes=max([_max_weights_bytes(decision), *(form.weights_bytes for form in forms)]),
        room_empty_bytes=_max_weights_bytes(unshared_decision)
        if unshared_decision is not None
        else None,
        fits_empty=bool(unshared_decision is not None and unshared_decision.plans),
        context=shorter.max_model_len.value if shorter is not None else None,
        change=change,
        forms=forms,
    )
    return decision.evolve(would_fit=fit)


def _weights(decision: Decision) -> int:
    """Bytes of the model's weights, all ranks together."""
    measured_parts = [
        rejection.memory.weights_bytes * _rank_count(rejection)
        for rejection in decision.rejected
        if rejection.memory is not None
    ]
    return min(measured_parts, default=0)


def _max_weights_bytes(decision: Decision) -> int:
    """The largest weights that would have room, all ranks together."""
    measured_parts = [
        (rejection.memory, _rank_count(rejection)) for rejection in decision.rejected
    ] + [(plan.memory, _rank_count(plan)) for plan in decision.plans[:1]]
    weight_limits = [
        (memory.budget_bytes - memory.activation_bytes - memory.overhead_bytes) * ranks
        for memory, ranks in measured_parts
        if memory is not None
    ]
    return max([0, *weight_limits])


def _rank_count(result: Plan | RejectedPlan) -> int:
    if isinstance(result, RejectedPlan):
        return result.tensor_parallel * result.pipeline_parallel * result.data_parallel
    return max(1, len(result.gpus))


def _missing_option(unplanned_model: UnplannedModel, shorter: Plan | None) -> str:
    """The first option of the wish without which there is a plan, in words; "": none is. shorter:
    the plan where no context is demanded."""
    wish = unplanned_model.wish
    flags = [
        (f"--arg {name}", {"args": {key: wish.args[key] for key in wish.args if key != name}})
        for name in wish.args
        if name.replace("_", "-") not in _CONTEXT_FLAGS
    ]
    resets: list[tuple[str, dict[str, Any]]] = [
        (option, {name: Wish.model_fields[name].get_default() for name in names})
        for option, names in _OPTIONS.items()
        if getattr(wish, names[0]) != Wish.model_fields[names[0]].get_default()
    ]
    for option, fields in (*resets, *flags):
        if plan := _first_plan(unplanned_model, wish.evolve(**fields)):
            return f"Leave out `{option}`: {_plan_words(plan)}"
    if not wish.text_only and (plan := _first_plan(unplanned_model, wish.evolve(text_only=True))):
        return f"Take `--text-only`: {_plan_words(plan)}"
    extended = _extension(unplanned_model)
    if shorter is None:
        return f"Take {extended}" if extended else ""
    tokens = shorter.max_model_len.value
    options = [
        f"--arg {name}={tokens}" for name in wish.args if name.replace("_", "-") in _CONTEXT_FLAGS
    ]
    if wish.least_context:
        options.append(f"{'--min-context' if wish.min_context else '--context'} {tokens}")
    change = f"Take `{' '.join(options)}`: {_plan_words(shorter)}"
    return f"{change}. For the whole context take {extended}" if extended else change


def _extension(unplanned_model: UnplannedModel) -> str:
    """The flag that extends the model's context to the wished one by YaRN, with its plan; "": none
    does. Only plain rotary embeddings are extended.

    Versions of vLLM read a scaled limit or `max_position_embeddings`, SGLang the latter: both are
    set.
    """
    spec = unplanned_model.spec
    wish = unplanned_model.wish
    least_context = wish.least_context
    limit = spec.max_position
    config = spec.config
    is_plain = config.get("rope_theta") is not None and not config.get("rope_scaling")
    is_overridden = any(name.replace("_", "-") in CONFIG_FLAGS for name in wish.args)
    if least_context is None or least_context <= limit or not is_plain or is_overridden:
        return ""
    factor = math.ceil(least_context / limit)
    if factor > _MAX_YARN_FACTOR:
        return ""
    scaling = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": limit,
        # The override replaces the whole object, which has the base in transformers 5.
        "rope_theta": config["rope_theta"],
    }
    override = json.dumps({"max_position_embeddings": factor * limit, "rope_scaling": scaling})
    for flag in CONFIG_FLAGS:
        if plan := _first_plan(unplanned_model, wish.evolve(args={**wish.args, flag: override})):
            return f"`--arg '{flag}={override}'` (YaRN; answers change): {_plan_words(plan)}"
    return ""


def _first_plan(unplanned_model: UnplannedModel, wish: Wish) -> Plan | None:
    try:
        return next(iter(unplanned_model.decide(unplanned_model.spec, wish).plans), None)
    except FitserveError:
        return None


def _plan_words(plan: Plan) -> str:
    count = len(plan.gpus)
    device_words = plural(count, "GPU") if count else "the CPU"
    context = f"{plan.max_model_len.value:,} tokens of context"
    return f"{plan.engine} then runs on {device_words} with {context}"


def _best_shorter_plan(unplanned_model: UnplannedModel) -> Plan | None:
    """The best plan where no context is demanded."""
    wish = unplanned_model.wish
    flags = {
        name: value
        for name, value in wish.args.items()
        if name.replace("_", "-") not in _CONTEXT_FLAGS
    }
    if wish.least_context is None and flags == wish.args:
        return None
    plans = unplanned_model.decide(
        unplanned_model.spec, _free_context(wish).evolve(args=flags)
    ).plans
    return plans[0] if plans else None


def _free_context(wish: Wish) -> Wish:
    """The wish with as much context as fits, up to the wished one."""
    return wish.evolve(context=None, min_context=None, max_context=wish.most_context)


def _other_shapes(
    unplanned_model: UnplannedModel, decision: Decision
) -> Iterator[tuple[str, str, Plan]]:
    if unplanned_model.spec.quant is not None:
        return
    for shape_text, config in _SHAPES.items():
        if _is_too_large(unplanned_model, decision, _BITS[config["quant_method"]]):
            continue
        quant = Quant(method=config["quant_method"], config=config)
        spec = unplanned_model.spec.evolve(
            quant=quant, config={**unplanned_model.spec.config, "quantization_config": config}
        )
        for plan in _best_plans(spec, unplanned_model):
            yield shape_text, "", plan


def _is_too_large(unplanned_model: UnplannedModel, decision: Decision, bits: int) -> bool:
    """Whether the weights with this many bits exceed the budget of every layout that is possible.

    Then no layout has a plan, and none is looked for. Offloaded weights are in no budget.
    """
    wish = unplanned_model.wish
    spec = unplanned_model.spec
    full_bits = 32 if "float32" in (wish.dtype, spec.dtype) else 16
    return not any("offload" in name for name in wish.args) and all(
        rejection.memory.weights_bytes * bits > rejection.memory.budget_bytes * full_bits
        if rejection.memory is not None
        else rejection.verdict in _LAYOUT_VERDICTS
        for rejection in decision.rejected
    )


def _variants(unplanned_model: UnplannedModel, hub: Hub) -> Iterator[tuple[str, str, Plan]]:
    """Quantized variants of the repository, as many as are read in time."""
    from concurrent.futures import ThreadPoolExecutor, wait  # not before a repository is read

    repo = unplanned_model.wish.source or ""
    end = time.monotonic() + _LIMIT_S
    if not REPOSITORY.fullmatch(repo) or unplanned_model.spec.revision is None:
        return
    readers = ThreadPoolExecutor(_MAX_READERS, thread_name_prefix="variant")
    try:
        listed_repos = readers.submit(hub.quantized_repositories, repo)
        wait([listed_repos], timeout=max(0.0, end - time.monotonic()))
        names = (
            listed_repos.result()[:_MAX_READ]
            if listed_repos.done() and listed_repos.exception() is None
            else ()
        )
        reading: dict[Future[ModelSpec], str] = {
            readers.submit(unplanned_model.read, name): name for name in names
        }
        finished, _ = wait(reading, timeout=max(0.0, end - time.monotonic()))
        for future in sorted(finished, key=lambda task: names.index(reading[task])):
            if future.exception() is None and time.monotonic() < end:
                for plan in _best_plans(future.result(), unplanned_model):
                    yield "", reading[future], plan
    finally:
        readers.shutdown(wait=False, cancel_futures=True)


def _best_plans(spec: ModelSpec, unplanned_model: UnplannedModel) -> Iterator[Plan]:
    """The best plan of another form, with less context if the wished context never fits."""
    wish = unplanned_model.wish.evolve(source=spec.source, revision=None)
    try:
        plans = unplanned_model.decide(spec, wish).plans or (
            unplanned_model.decide(spec, _free_context(wish)).plans if wish.least_context else ()
        )
    except FitserveError:
        return
    yield from plans[:1]


def _best(
    forms: Iterable[tuple[str, str, Plan]], unplanned_model: UnplannedModel
) -> list[ModelForm]:
    """The forms with the wished context and sound kernels first, then by the most weights kept."""
    goal_context = wanted_context(unplanned_model.spec, unplanned_model.wish, {})
    ranked = sorted(
        forms,
        key=lambda form: (
            shortcomings(form[2], goal_context),
            form[2].verdict == "degraded",
            -form[2].memory.weights_bytes * _rank_count(form[2]),
        ),
    )
    return [
        ModelForm(
            quantization=change or plan.quantization.value,
            source=source,
            weights_bytes=plan.memory.weights_bytes * _rank_count(plan),
            context=plan.max_model_len.value,
            engine=str(plan.engine),
            gpus=len(plan.gpus),
        )
        for change, source, plan in ranked[:_MAX_ALTERNATIVES]
    ]
