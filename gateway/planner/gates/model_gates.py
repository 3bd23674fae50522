"""Gates of a model: trust in its code, its architecture, adapters and template. Pure."""

from __future__ import annotations

from gateway.domain import Engine, ModelSpec
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.chat import template
from gateway.engines.common.lora.adapter_flags import LIST_FLAGS, supported_rank
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.refusal import RefusalError
from gateway.engines.registry import engine_kind
from gateway.models.spec import TOKENIZER_CODE
from gateway.planner.sizes import context_limit


def gate_model(inputs: PlanningInput, engine: Engine, rules: EngineRules) -> None:
    """Refuse a model that the engine cannot serve in any way. Raises RefusalError."""
    spec = inputs.spec
    # A reader of the family describes a class of the engine's own, not that of transformers.
    is_described = bool(spec.structure or spec.guessed)
    builds = rules.builds(spec.architecture, engine) or (
        is_described and spec.architecture in engine.stand_ins and stands_in(spec, engine)
    )
    if engine.architectures and not builds:
        reason = f"{engine.ref} does not know {spec.architecture}"
        if stands_in(spec, engine):
            reason = (
                f"{engine.ref} has no class of its own for {spec.architecture}, and whether it"
                " serves that of transformers is unknown: `fitserve plan --check` asks the engine"
                " where it is installed"
            )
        raise RefusalError("unsupported_architecture", reason, f"profile {engine.ref}")
    if not inputs.wish.policy.allow_remote_code and (foreign_code := _foreign_part(spec, engine)):
        reason = (
            f"{engine.ref} would need code of the repository ({', '.join(spec.remote_code[:5])}):"
            f" it has no {foreign_code} of its own"
        )
        raise RefusalError("untrusted_code", reason, "policy.allow_remote_code")
    if inputs.template.digest and template.FLAG not in engine.flags:
        raise RefusalError(
            "bad_flag",
            f"{engine.ref} accepts only the model's own chat template",
            f"profile {engine.ref}",
        )
    gate_context(inputs)
    gate_adapters(inputs, engine)
    unfit = (
        {group.head_dim for group in spec.attention} - set(engine.head_dims)
        if engine.head_dims
        else set()
    )
    if unfit:
        raise RefusalError(
            "no_backend",
            f"no attention of {engine.ref} computes heads of size {min(unfit)}",
            f"profile {engine.ref}",
        )


def gate_context(inputs: PlanningInput) -> None:
    """Refuse a context that no form of the model reaches."""
    spec = inputs.spec
    wish = inputs.wish
    limit = context_limit(spec, wish)
    least_context = wish.least_context
    if least_context is None or least_context <= limit:
        return
    option = "--min-context" if wish.min_context else "--context"
    reason = f"a context of at least {least_context} tokens was asked for ({option}), and "
    if limit != spec.max_position:
        reason += f"one of at most {limit} as well: raise --max-context"
    elif spec.has_open_limit:
        reason += (
            f"{limit} is assumed as the model's limit: add --max-context {least_context}, or"
            f" take {option} {limit} or less"
        )
    else:
        reason += f"the model's own limit is {limit}"
    raise RefusalError("bad_flag", reason, spec.sources.get("max_position", "wish"))


def gate_adapters(inputs: PlanningInput, engine: Engine) -> None:
    """Refuse adapters whose rank or base model the engine does not support.

    Support for the architecture is known by the engine's own code, which is asked later.
    """
    if not inputs.adapters:
        return
    source = f"profile {engine.ref}"
    if "enable-lora" not in engine.flags or not LIST_FLAGS.keys() & engine.flags.keys():
        raise RefusalError("unsupported_lora", f"{engine.ref} serves no adapters", source)
    if inputs.spec.architecture in engine.no_lora:
        reason = f"{engine.ref} has no adapters for {inputs.spec.architecture}"
        raise RefusalError("unsupported_lora", reason, engine.sources.get("no_lora", source))
    if supported_rank(engine, inputs.adapters) is None:
        highest = max(inputs.adapters, key=lambda adapter: adapter.rank)
        max_rank = max(map(int, engine.flags["max-lora-rank"].choices or ("0",)))
        reason = (
            f"the adapter {highest.name} has rank {highest.rank}, and {engine.ref} takes at most"
            f" {max_rank}"
        )
        raise RefusalError("unsupported_lora", reason, source)
    if inputs.spec.experts:
        reason = (
            f"with which kernels {engine.ref} computes the experts of a model that has adapters is"
            " not known here"
        )
        source = engine_kind(engine.kind).code_sources.expert_adapters
        raise RefusalError("unsupported_lora", reason, source)
    if not inputs.spec.generates:
        raise RefusalError(
            "unsupported_lora",
            "adapters of a model that does not generate are not served here",
            "planner",
        )


def stands_in(spec: ModelSpec, engine: Engine) -> bool:
    """Whether the engine would try transformers' class of an architecture that it lacks, and none
    of the repository's."""
    has_own_classes = (
        "TransformersForCausalLM" in engine.architectures
        and spec.model_type in engine.config_classes
    )
    return has_own_classes and not spec.remote_code


def _foreign_part(spec: ModelSpec, engine: Engine) -> str:
    """The part of the engine that the repository's code would replace; "": none.

    Untrusted code never runs. The class of the model is the engine's, as its architecture is
    listed. Source: from_pretrained of AutoConfig and AutoTokenizer, which prefer a class that they
    have.
    """
    if not spec.remote_code:
        return ""
    if not engine.architectures:
        return "known class for this model"
    if spec.model_type not in engine.config_classes:
        return f"configuration class for {spec.model_type}"
    if TOKENIZER_CODE in spec.remote_code and spec.model_type not in engine.tokenizers:
        return f"tokenizer for {spec.model_type}"
    return ""
