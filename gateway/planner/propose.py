"""The Plan of a sized candidate: choices with reasons, flags, and warnings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.diagnosis.facts.peers import failing_links
from gateway.domain import (
    AdapterRef,
    Choice,
    Engine,
    EngineRef,
    Grade,
    ModelRef,
    Plan,
    Question,
    Scalar,
    Speed,
    int_choice,
)
from gateway.domain.release import release
from gateway.engines.common import sleep_mode
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.chat import template
from gateway.engines.common.chat.parsers import NO_PARSER, REASONING_FLAG, TOOLS_FLAG
from gateway.engines.common.lora.adapter_flags import capacity_flags
from gateway.engines.common.resources import OFFLOAD_FLAG
from gateway.planner.copies import copies
from gateway.planner.flags import spell_flags
from gateway.planner.proposal import plan_choices as choices
from gateway.planner.proposal.kv_offload import kv_offload
from gateway.planner.proposal.plan_variables import engine_variables, sleep_variables
from gateway.planner.proposal.plan_warnings import plan_warnings, replacement_reason
from gateway.planner.proposal.request_order import order_flags, request_order
from gateway.planner.sizes import Batch, Sizes

# Flags whose value follows from the answer, or which are asked about separately.
_ANSWER_FLAGS = (
    "max-model-len",
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "speculative-config",
    "speculative-algorithm",
    "speculative-num-steps",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
)

# Advisories that a sentence names.
_MAX_ADVISORIES = 3


def propose(candidate: Candidate, sizes: Sizes, env: dict[str, str]) -> Plan:
    """The plan of a candidate with these sizes. env: the operator's, and that of the variant."""
    engine, speculation = candidate.engine, candidate.speculation
    link_failures = failing_links(candidate.inputs.facts, engine, candidate.gpus)
    reduce = choices.all_reduce(candidate, link_failures)
    replicas, speed = copies(candidate, sizes, has_direct_links=reduce.value)
    sleeps, offload = _choose_ram_use(candidate, sizes, env, speed, replicas.value)
    variables = engine_variables(candidate, env, link_failures, sizes) | sleep_variables(
        candidate, sleeps
    )
    tools, reasoning = choices.parsers(candidate)
    flags = _flags(candidate, sizes.batch, sizes, reduce=reduce.value)
    flags |= _parser_flags(tools, reasoning, candidate.inputs.template)
    flags |= _service_flags(candidate, sizes, sleeps, offload) | dict(candidate.args)
    return Plan(
        model=candidate.inputs.model,
        engine=EngineRef(kind=engine.kind, version=engine.version, image=engine.image),
        gpus=tuple([gpu.uuid for gpu in candidate.gpus]),
        tensor_parallel=choices.tensor_parallel(candidate),
        pipeline_parallel=choices.pipeline_parallel(candidate),
        expert_parallel=choices.expert_parallel(candidate),
        data_parallel=choices.data_parallel(candidate, sizes),
        replicas=replicas,
        dtype=candidate.dtype,
        quantization=choices.quantization(candidate),
        kv_cache_dtype=choices.kv_cache_dtype(candidate),
        kernel_overrides=choices.overrides(candidate),
        speculation=speculation.method,
        num_speculative_tokens=speculation.tokens
        or int_choice(0, speculation.method.reason, speculation.method.source),
        drafter=_drafter_ref(candidate),
        adapters=_adapter_refs(candidate),
        loras=choices.loras(candidate),
        chat_template=candidate.inputs.template.choice,
        tool_parser=tools,
        reasoning_parser=reasoning,
        max_model_len=sizes.context,
        max_num_seqs=sizes.batch.seqs,
        max_num_batched_tokens=sizes.batch.tokens,
        custom_all_reduce=reduce,
        enforce_eager=sizes.batch.eager,
        sleep_mode=sleeps,
        kv_offload_gib=offload,
        request_order=request_order(candidate),
        kernels=candidate.evidence.kernels,
        attention=candidate.evidence.attention,
        memory=sizes.memory,
        cap=sizes.cap,
        speed=speed,
        grade=_plan_grade(candidate),
        verdict="degraded" if _is_degraded(candidate) else "ok",
        cost=candidate.variant.cost,
        argv=spell_flags(engine, flags),
        env={name: choice.value for name, choice in variables.items()},
        variables=variables,
        scope=sizes.scope,
        software=_software(candidate),
        warnings=plan_warnings(candidate, sizes, link_failures),
        advice=advice(engine),
    )


def _adapter_refs(candidate: Candidate) -> tuple[AdapterRef, ...]:
    return tuple(
        AdapterRef(name=adapter.name, source=adapter.source, revision=adapter.revision)
        for adapter in candidate.inputs.adapters
    )


def _software(candidate: Candidate) -> dict[str, Any]:
    """The image and driver that the plan holds for."""
    driver = candidate.inputs.hardware.driver
    return {"image": candidate.engine.image} | ({"driver": driver} if driver else {})


def _plan_grade(candidate: Candidate) -> Grade:
    if candidate.evidence.answer:
        return "checked"
    if candidate.engine.guessed_from or candidate.inputs.spec.guessed:
        return "guess"
    return "predicted"


def question(candidate: Candidate, batch: Batch, env: Mapping[str, str]) -> Question:
    """The question to the engine's code: the plan's command line without values from the answer."""
    reduce = choices.all_reduce(
        candidate, failing_links(candidate.inputs.facts, candidate.engine, candidate.gpus)
    )
    flags = {**_flags(candidate, batch, None, reduce=reduce.value), **candidate.args}
    asked_flags = {name: value for name, value in flags.items() if name not in _ANSWER_FLAGS}
    if not (spec := candidate.inputs.spec).generates:
        # The engine counts all positions, even those that a model keeps for itself. It refuses a
        # batch that is smaller than its longest request.
        asked_flags["max-model-len"] = min(
            spec.max_position, candidate.inputs.wish.most_context or spec.max_position
        )
    return Question(
        engine=candidate.engine.ref,
        capability=candidate.gpus[0].capability if candidate.gpus else None,
        argv=tuple(sorted(spell_flags(candidate.engine, asked_flags))),
        env=tuple(sorted(env.items())),
    )


def _flags(
    candidate: Candidate, batch: Batch, sizes: Sizes | None, *, reduce: bool
) -> dict[str, Scalar]:
    """The flags by canonical names. sizes: None before the candidate is sized."""
    variant = candidate.variant
    planned_flags: dict[str, Scalar] = {
        "tensor-parallel-size": variant.tp,
        "dtype": candidate.dtype.value,
    }
    planned_flags |= {"max-model-len": sizes.context.value} if sizes else {}
    planned_flags |= {"pipeline-parallel-size": variant.pp} if variant.pp > 1 else {}
    planned_flags |= {"enable-expert-parallel": True} if variant.ep else {}
    planned_flags |= candidate.rules.layout_flags(variant, candidate.engine)
    planned_flags |= {
        "max-num-seqs": batch.seqs.value * candidate.counted_groups,
        "max-num-batched-tokens": batch.tokens.value * candidate.counted_groups,
        **(sizes.flags if sizes else {}),
    }
    planned_flags |= {"kv-cache-dtype": variant.kv_dtype} if variant.kv_dtype != "auto" else {}
    planned_flags |= {"quantization": variant.quantization} if variant.quantization else {}
    planned_flags |= dict(variant.backends)
    # Only SGLang needs the flag, which is left out where an engine does not have it.
    planned_flags |= {"is-embedding": True} if not candidate.inputs.spec.generates else {}
    planned_flags |= candidate.rules.speculation_flags(candidate.speculation)
    planned_flags |= (
        {"enforce-eager": True}
        if batch.eager.value
        else candidate.rules.graph_flags(candidate, batch.seqs.value)
    )
    planned_flags |= capacity_flags(candidate.engine, candidate.inputs.adapters)
    return planned_flags | ({} if reduce else {"disable-custom-all-reduce": True})


def _drafter_ref(candidate: Candidate) -> ModelRef | None:
    config = candidate.speculation.config
    if "model" not in config:
        return None
    vocab = candidate.inputs.spec.vocab
    return ModelRef(
        source=config["model"], revision=config.get("revision"), task="generate", vocab=vocab
    )


def _is_degraded(candidate: Candidate) -> bool:
    rows = candidate.evidence.kernels
    guessed = bool(candidate.inputs.spec.guessed) or not candidate.built_model.is_known
    is_unread = guessed and candidate.evidence.answer is None
    is_unsure = candidate.variant.conservative or bool(replacement_reason(candidate)) or is_unread
    return is_unsure or any(row.status == "unknown" or row.note for row in rows)


def _parser_flags(
    tools: Choice[str], reasoning: Choice[str], chosen_parser: template.ChosenTemplate
) -> dict[str, Scalar]:
    """The flags of templates and parsers. A question leaves them out, because they change no
    computation."""
    reading_flags: dict[str, Scalar] = (
        {TOOLS_FLAG: tools.value, "enable-auto-tool-choice": True}
        if tools.value != NO_PARSER
        else {}
    )
    reading_flags |= (
        {template.FLAG: template.file_name(chosen_parser.digest)} if chosen_parser.digest else {}
    )
    return reading_flags | (
        {REASONING_FLAG: reasoning.value} if reasoning.value != NO_PARSER else {}
    )


def _choose_ram_use(
    candidate: Candidate, sizes: Sizes, env: Mapping[str, str], speed: Speed | None, count: int
) -> tuple[Choice[bool], Choice[int | float]]:
    """Sleep mode, and the KV cache in RAM. count: of copies."""
    sleeps = choices.sleep_choice(candidate, sizes, env)
    return sleeps, kv_offload(candidate, sizes.memory, speed, count, has_sleep_mode=sleeps.value)


def _service_flags(
    candidate: Candidate, sizes: Sizes, mode: Choice[bool], offload: Choice[int | float]
) -> dict[str, Scalar]:
    """The flags of sleep mode, of a KV cache in RAM and of the order of requests. A question leaves
    them out, because they compute nothing.

    Clients' words that an engine would log for its developers stay out of its log.
    """
    quiet_flags = {"log-error-stack": False} if "log-error-stack" in candidate.engine.flags else {}
    cache_flags: dict[str, Scalar] = {OFFLOAD_FLAG: offload.value} if offload.value else {}
    order = request_order(candidate)
    cache_flags |= order_flags(candidate, order, sizes.batch.tokens.value)
    return cache_flags | ({sleep_mode.FLAG: True, **quiet_flags} if mode.value else {})


def advice(engine: Engine) -> str:
    """The weaknesses of this version and a version without them; "": none."""
    advisories = engine.advisories
    if not advisories:
        return ""
    ids = ", ".join(advisory.id for advisory in advisories[:_MAX_ADVISORIES])
    suffix = (
        f" and {len(advisories) - _MAX_ADVISORIES} more"
        if len(advisories) > _MAX_ADVISORIES
        else ""
    )
    fixes = [advisory.fixed_in for advisory in advisories if advisory.fixed_in]
    cure = f"from {max(fixes, key=release)} on it has none of them" if fixes else ""
    if len(fixes) < len(advisories):
        unfixed = len(advisories) - len(fixes)
        cure = f"of {unfixed} no fixed version is known"
    return f"Known weaknesses of {engine.ref}: {ids}{suffix}; {cure}."
