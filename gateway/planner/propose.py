"""The Plan of a sized candidate: choices with reasons, flags, and warnings. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.diagnosis.facts.peers import CUSTOM, P2P, P2P_OFF, failing_links
from gateway.domain import (
    AdapterRef,
    Choice,
    Engine,
    EngineRef,
    Fact,
    Grade,
    Memory,
    ModelRef,
    Plan,
    Question,
    Scalar,
    bool_choice,
    int_choice,
    str_choice,
)
from gateway.domain.release import release
from gateway.domain.units import GIB, gib, words
from gateway.engines.common import expert_warmups, sleep_mode
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.chat import template
from gateway.engines.common.chat.parsers import NO_PARSER, REASONING, TOOLS
from gateway.engines.common.engine_auth import DEV_MODE
from gateway.engines.common.kernels.compiled import runs
from gateway.engines.common.kernels.linear import DISABLED
from gateway.engines.common.lora.adapter_flags import capacity_flags, supported_rank
from gateway.engines.common.planning_input import left_bytes
from gateway.planner.copies import copies
from gateway.planner.flags import spelled
from gateway.planner.sizes import Batch, Sizes
from gateway.variables import NO_PROXY

# Flags whose value follows from the answer, or which are asked about alone.
_FROM_THE_ANSWER = (
    "max-model-len",
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "speculative-config",
)
# The largest file that transformers 4 writes, which an engine maps as it reads its weights.
_SHARD_BYTES = 5 * GIB
# Advisories that a sentence names.
_MOST_NAMED = 3
_DECLARED_CACHE = "what the checkpoint says of its cache"


def propose(candidate: Candidate, sizes: Sizes, env: dict[str, str]) -> Plan:
    """The plan of a candidate with these sizes. env: the operator's, and that of the variant."""
    engine, speculation = candidate.engine, candidate.speculation
    silent = failing_links(candidate.inputs.facts, engine, candidate.group)
    reduce = _all_reduce(candidate, silent)
    replicas, speed = copies(candidate, sizes, direct=reduce.value)
    sleeps = _sleep_mode(candidate, sizes, env)
    variables = _variables(candidate, env, silent, sizes)
    variables |= _sleeping(candidate, sleeps)
    tools, reasoning = _parsers(candidate)
    flags = {
        **_flags(candidate, sizes.batch, sizes, reduce=reduce.value),
        **_reading(tools, reasoning, candidate.inputs.template),
        **_asleep(candidate, sleeps),
        **candidate.args,
    }
    return Plan(
        model=candidate.inputs.model,
        engine=EngineRef(kind=engine.kind, version=engine.version, image=engine.image),
        gpus=tuple([gpu.uuid for gpu in candidate.group]),
        tensor_parallel=_tensor_parallel(candidate),
        pipeline_parallel=_pipeline_parallel(candidate),
        expert_parallel=_expert_parallel(candidate),
        data_parallel=_data_parallel(candidate, sizes),
        replicas=replicas,
        dtype=candidate.dtype,
        quantization=_quantization(candidate),
        kv_cache_dtype=_kv_cache_dtype(candidate),
        kernel_overrides=_overrides(candidate),
        speculation=speculation.method,
        num_speculative_tokens=speculation.tokens
        or int_choice(0, speculation.method.reason, speculation.method.source),
        drafter=_drafter(candidate),
        adapters=_adapter_refs(candidate),
        loras=_loras(candidate),
        chat_template=candidate.inputs.template.choice,
        tool_parser=tools,
        reasoning_parser=reasoning,
        max_model_len=sizes.context,
        max_num_seqs=sizes.batch.seqs,
        max_num_batched_tokens=sizes.batch.tokens,
        custom_all_reduce=reduce,
        enforce_eager=sizes.batch.eager,
        sleep_mode=sleeps,
        kernels=candidate.evidence.kernels,
        attention=candidate.evidence.attention,
        memory=sizes.memory,
        cap=sizes.cap,
        speed=speed,
        grade=_grade(candidate),
        verdict="degraded" if _degraded(candidate) else "ok",
        cost=candidate.variant.cost,
        argv=spelled(engine, flags),
        env={name: choice.value for name, choice in variables.items()},
        variables=variables,
        scope=sizes.scope,
        under=_software(candidate),
        warnings=_plan_warnings(candidate, sizes, silent),
        advice=advice(engine),
    )


def _plan_warnings(
    candidate: Candidate, sizes: Sizes, silent: Mapping[str, Fact]
) -> tuple[str, ...]:
    return (
        *sizes.warnings,
        *_kernel_warnings(candidate),
        *_rule_warnings(candidate),
        *_load_warnings(candidate),
        *_through_the_host(silent),
        *_beside_host(candidate, sizes.memory),
        *_left_out(candidate),
        *_short_answers(candidate, sizes),
    )


def _adapter_refs(candidate: Candidate) -> tuple[AdapterRef, ...]:
    return tuple(
        AdapterRef(name=adapter.name, source=adapter.source, revision=adapter.revision)
        for adapter in candidate.inputs.adapters
    )


def _pipeline_parallel(candidate: Candidate) -> Choice[int]:
    reason = _reason_and_source(candidate, "pp", "pipeline-parallel-size", "one stage is enough")
    return int_choice(candidate.variant.pp, *reason)


def _data_parallel(candidate: Candidate, sizes: Sizes) -> Choice[int]:
    dp, tp = candidate.variant.dp, candidate.variant.tp
    if candidate.inputs.wish.data_parallel or "data-parallel-size" in candidate.args:
        return int_choice(dp, "set by the user", "user")
    if dp == 1:
        return int_choice(1, "all ranks work on the same requests", "planner")
    rank_words = "each GPU" if tp == 1 else f"each group of {tp} GPUs"
    tokens = f"{sizes.memory.kv_tokens * dp:,} tokens in all"
    return int_choice(
        dp, f"{rank_words} keeps the KV cache of its own requests, {tokens}", "memory model"
    )


def _expert_parallel(candidate: Candidate) -> Choice[bool]:
    whole = "experts are cut like other layers" if candidate.inputs.spec.experts else "no experts"
    if candidate.variant.dp > 1 and candidate.variant.ep:
        whole = "whole experts on each GPU, beside attention of its own"
    return bool_choice(
        candidate.variant.ep, *_reason_and_source(candidate, "ep", "enable-expert-parallel", whole)
    )


def _software(candidate: Candidate) -> dict[str, Any]:
    """The image and driver that the plan holds for."""
    driver = candidate.inputs.hardware.driver
    return {"image": candidate.engine.image} | ({"driver": driver} if driver else {})


def _kv_cache_dtype(candidate: Candidate) -> Choice[str]:
    value, spec, engine = candidate.variant.kv_dtype, candidate.inputs.spec, candidate.engine
    plain = "the dtype of the activations" if value == "auto" else _DECLARED_CACHE
    reason, source = _reason_and_source(candidate, "kv_dtype", "kv-cache-dtype", plain)
    if reason != _DECLARED_CACHE:
        return str_choice(value, reason, source)
    cache_rows = [row for row in engine.cache_defaults if spec.architecture in row.architectures]
    if cache_rows and cache_rows[0].dtype == value:
        reason = f"what {engine.ref} gives {spec.architecture} on this GPU"
        return str_choice(value, reason, cache_rows[0].source)
    return str_choice(value, reason, spec.quant.file if spec.quant else source)


def _grade(candidate: Candidate) -> Grade:
    if candidate.evidence.answer:
        return "checked"
    if candidate.engine.guessed_from or candidate.inputs.spec.guessed:
        return "guess"
    return "predicted"


def question(candidate: Candidate, batch: Batch, env: Mapping[str, str]) -> Question:
    """The question to the engine's code: the plan's command line without values from the answer."""
    reduce = _all_reduce(
        candidate, failing_links(candidate.inputs.facts, candidate.engine, candidate.group)
    )
    flags = {**_flags(candidate, batch, None, reduce=reduce.value), **candidate.args}
    asked_flags = {name: value for name, value in flags.items() if name not in _FROM_THE_ANSWER}
    if not (spec := candidate.inputs.spec).generates:
        # Of positions that a model keeps for itself the engine counts all, and refuses a batch that
        # is smaller than its longest request.
        asked_flags["max-model-len"] = min(
            spec.max_position, candidate.inputs.wish.max_context or spec.max_position
        )
    return Question(
        engine=candidate.engine.ref,
        capability=candidate.group[0].capability if candidate.group else None,
        argv=tuple(sorted(spelled(candidate.engine, asked_flags))),
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
    # Only SGLang has to be told; the flag is left out where an engine does not have it.
    planned_flags |= {"is-embedding": True} if not candidate.inputs.spec.generates else {}
    config = candidate.speculation.config
    planned_flags |= {"speculative-config": json.dumps(config)} if config else {}
    planned_flags |= (
        {"enforce-eager": True}
        if batch.eager.value
        else candidate.rules.graph_flags(candidate, batch.seqs.value)
    )
    planned_flags |= capacity_flags(candidate.engine, candidate.inputs.adapters)
    return planned_flags | ({} if reduce else {"disable-custom-all-reduce": True})


def _drafter(candidate: Candidate) -> ModelRef | None:
    config = candidate.speculation.config
    if "model" not in config:
        return None
    vocab = candidate.inputs.spec.vocab
    return ModelRef(
        source=config["model"], revision=config.get("revision"), task="generate", vocab=vocab
    )


def _degraded(candidate: Candidate) -> bool:
    rows = candidate.evidence.kernels
    guessed = bool(candidate.inputs.spec.guessed) or not candidate.built.is_known
    unread = guessed and candidate.evidence.answer is None
    unsure = candidate.variant.conservative or bool(_replaced(candidate)) or unread
    return unsure or any(row.status == "unknown" or row.note for row in rows)


def _through_the_host(silent: Mapping[str, Fact]) -> list[str]:
    if P2P not in silent:
        return []
    name, value = P2P_OFF
    return [
        f"The GPUs talk through the host's memory ({name}={value}), which is slower:"
        f" {silent[P2P].source}"
    ]


def _beside_host(candidate: Candidate, memory: Memory) -> list[str]:
    """The warning with the figures of memory that GPU and host share."""
    if not candidate.unified:
        return []
    total, free = (
        min(gpu.total_bytes or 0 for gpu in candidate.group),
        min(candidate.inputs.available[gpu.uuid] for gpu in candidate.group),
    )
    pages = min(candidate.inputs.spec.file_bytes or memory.weights_bytes, _SHARD_BYTES)
    kept_bytes, promised_bytes = max(map(left_bytes, candidate.group)), memory.promised_bytes
    figures = (
        f"GPU and host share {gib(total)}, of which {gib(free)} are free: the engine takes"
        f" {gib(promised_bytes)}, and {gib(max(0, free - promised_bytes))} stay for the host"
    )
    if free - promised_bytes < kept_bytes:
        return [
            f"{figures}. That is less than the {gib(kept_bytes)} that the host should keep"
            " (FITSERVE_HOST_BYTES): without them the machine may hang while the engine starts."
        ]
    loads = memory.weights_bytes + memory.beside_bytes + pages
    slow = ", which is more than is free: files are read several times"
    return [
        f"{figures}. While the weights load, the page cache takes up to {gib(pages)} more"
        f"{slow if loads > free else ''}."
    ]


def _layers_without(candidate: Candidate, kernel: str) -> int:
    """The number of layers that lose this kernel because its switch is for the whole model."""
    passed = [
        row
        for row in candidate.evidence.kernels
        if any(refusal.kernel == kernel and refusal.reason == DISABLED for refusal in row.refused)
    ]
    return sum(row.count for row in passed)


def _replaced(candidate: Candidate) -> str:
    """Why the engine is kept from the kernel that it would choose."""
    because = candidate.variant.reasons
    return "; ".join(because[name][0] for name in ("disabled", "backends") if name in because)


def _kernel_warnings(candidate: Candidate) -> list[str]:
    """The warnings about kernels and speculation."""
    evidence = candidate.evidence
    warnings = [f"{row.layer}: {row.note}." for row in evidence.kernels if row.note]
    warnings += (
        [f"Not the kernel that the engine would choose: {why}."]
        if (why := _replaced(candidate))
        else []
    )
    warnings += [
        f"The engine can leave out {kernel} for the whole model only: {count} layers go without it,"
        " and may be slower."
        for kernel in candidate.variant.disabled
        if (count := _layers_without(candidate, kernel)) > 1
    ]
    warnings += candidate.speculation.warnings
    if unknown := [row.layer for row in evidence.kernels if row.status == "unknown"]:
        warnings.append(
            f"Which kernel computes {', '.join(unknown[:3])} is not known; the start will tell."
        )
    if unknown := sorted({row.kind for row in evidence.attention if row.status == "unknown"}):
        warnings.append(
            f"Which backend computes {', '.join(unknown)} attention is not known; the start will"
            " tell."
        )
    return warnings


def _rule_warnings(candidate: Candidate) -> list[str]:
    """The warnings about guesses and missing rules."""
    spec, evidence, built = candidate.inputs.spec, candidate.evidence, candidate.built
    warnings = []
    if (spec.guessed or not built.is_known) and evidence.answer is None:
        guessed = (
            f"{', '.join(spec.guessed)} are guessed from the names of fields in config.json"
            if spec.guessed
            else ""
        )
        files = "" if built.is_known else "sizes are those of its files, kernels are not predicted"
        details = "; ".join(part for part in (guessed, files) if part)
        warnings.append(
            f"Layers of {spec.model_type} as these are not known here: {details}. --check asks the"
            " engine."
        )
    capability = candidate.group[0].capability if candidate.group else None
    if (
        candidate.engine.compiled
        and capability
        and runs(candidate.engine.compiled, capability) == "ptx"
    ):
        warnings.append(
            f"{candidate.engine.ref} holds no code for compute capability {capability}: the driver"
            " compiles what has PTX when it starts, and what has none fails."
        )
    if (near := candidate.engine.guessed_from) and evidence.answer is None:
        # An image of another name may say that it holds a version with rules.
        subject = (
            candidate.engine.ref
            if near != candidate.engine.ref
            else f"The image {candidate.engine.image}"
        )
        warnings.append(
            f"{subject} has no rules of its own: this is what {near} would do. Its own code was not"
            " asked."
        )
    if built.assumed:
        warnings.append(f"{built.assumed[:1].upper()}{built.assumed[1:]}.")
    return warnings


def _load_warnings(candidate: Candidate) -> list[str]:
    """The warnings about quantization while loading, unequal stages, and expected speed."""
    spec, warnings = candidate.inputs.spec, []
    if candidate.variant.quantization and spec.quant is None:
        quantization = candidate.variant.quantization
        warnings.append(
            f"The weights are quantized to {quantization} while they load, which costs some"
            " accuracy."
        )
    if len({gpu.name for gpu in candidate.group}) > 1:
        names = ", ".join(gpu.name for gpu in candidate.group)
        if candidate.variant.tp > 1:
            details = (
                "the KV cache is as large as on the one with the least memory, and the slowest sets"
                " the pace"
            )
        elif layers := candidate.variant.layers:
            details = f"they have {', '.join(map(str, layers))} layers"
        else:
            details = "each has as many layers, and the smallest and slowest sets the pace"
        parts = "ranks" if candidate.variant.tp > 1 else "stages"
        warnings.append(
            f"Its {parts} are on different GPUs ({names}): {details}. Kernels are listed"
            f" for {candidate.group[0].name}."
        )
    if candidate.inputs.adapters and candidate.inputs.pace:
        warnings.append(
            "Its expected speed is that of the model alone; requests to adapters are slower."
        )
    return [*warnings, *_widened(candidate)]


def _widened(candidate: Candidate) -> list[str]:
    """The warning that this GPU has no products in the format of the weights."""
    table, group = candidate.inputs.gpus, candidate.group
    if table is None or not group:
        return []
    formats = sorted(
        {
            lacking
            for kind in candidate.built.kinds
            if (lacking := table.widened(kind, group[0].capability))
        }
    )
    card = f"{group[0].name} (compute capability {group[0].capability})"
    return [
        f"The {name.upper()} weights are smaller, not faster: {card} widens them to 16 bits for"
        " every product."
        for name in formats
    ]


# --- choices ---


def _reason_and_source(candidate: Candidate, name: str, flag: str, plain: str) -> tuple[str, str]:
    """Reason and source of a value that a variant may change by `name`, and a user by `flag`."""
    if flag in candidate.args:
        return "set by the user", "user"
    return candidate.variant.reasons.get(name, (plain, "planner"))


def _tensor_parallel(candidate: Candidate) -> Choice[int]:
    tp = candidate.variant.tp
    if candidate.inputs.wish.tensor_parallel or "tensor-parallel-size" in candidate.args:
        return int_choice(tp, "set by the user", "user")
    if candidate.engine.device == "cpu":
        return int_choice(1, "the engine runs on the CPU", candidate.source)
    if tp == 1 and candidate.variant.dp > 1:
        return int_choice(1, "attention is whole on each GPU", "planner")
    if tp == 1:
        fits = "the model fits one GPU" if candidate.variant.pp == 1 else "each stage fits one GPU"
        return int_choice(1, fits, "memory model")
    heads = "/".join(
        str(group.heads)
        for group in candidate.built.attention
        if group.kind not in ("vision", "recurrent")
    )
    reason = f"{heads} attention heads and the weights divide by {tp}"
    return int_choice(tp, reason, candidate.inputs.spec.sources.get("heads", "planner"))


def _loaded_as(candidate: Candidate, named: str) -> str:
    method = candidate.evidence.method
    loaded_words = (
        f"; {candidate.engine.ref} loads it as {method}" if method not in ("", named) else ""
    )
    return f"what the checkpoint says of itself{loaded_words}"


def _quantization(candidate: Candidate) -> Choice[str]:
    quant, variant = candidate.inputs.spec.quant, candidate.variant
    if "quantization" in candidate.args:
        return str_choice(variant.quantization, "set by the user", "user")
    if variant.quantization:
        reason, source = variant.reasons["quantization"]
        return str_choice(variant.quantization, reason, source)
    if quant is None:
        return str_choice("none", "the weights are not quantized", "config.json")
    return str_choice(quant.method, _loaded_as(candidate, quant.method), quant.file)


def _variables(
    candidate: Candidate, env: Mapping[str, str], silent: Mapping[str, Fact], sizes: Sizes
) -> dict[str, Choice[str]]:
    """Why the engine gets each of its variables; `env` are the operator's, and what the variant
    adds to them."""
    engine, wish_env, global_env = (
        candidate.engine,
        candidate.inputs.wish.env,
        candidate.inputs.global_env,
    )
    variables_found = _start_method(candidate, sizes.scope, env)
    for name, value in engine.eager_env.items() if sizes.batch.eager.value else ():
        variables_found[name] = str_choice(
            value, "needed without CUDA graphs", f"profile {engine.ref}"
        )
    if P2P in silent:
        variables_found[P2P_OFF[0]] = str_choice(
            P2P_OFF[1], f"the GPUs could not talk to each other: {silent[P2P].source}", "fact"
        )
    for name, value in env.items():
        if name == candidate.rules.stage_layers_env and candidate.variant.layers:
            reason, source = candidate.variant.reasons["layers"]
        elif wish_env.get(name) != value:
            reason, source = candidate.variant.reasons.get(
                "disabled", ("kernels that the engine is kept from", "planner")
            )
        elif global_env.get(name) == value:
            reason, source = "set for all engines", "FITSERVE_ENGINE_ENV"
        elif name in NO_PROXY:
            reason, source = "the engine asks itself over loopback, past the proxy", "planner"
        else:
            reason, source = "set by the user", "user"
        variables_found[name] = str_choice(value, reason, source)
    return variables_found


def _start_method(
    candidate: Candidate, scope: Mapping[str, str], env: Mapping[str, str]
) -> dict[str, Choice[str]]:
    """How the engine starts its processes, and what forks of it leave out. A failure of a fork here
    leaves that to the engine."""
    if next(candidate.inputs.facts.holding("fork_fails", scope), None) is not None:
        return {}
    chosen = candidate.rules.start_method(
        candidate.engine, candidate.args, candidate.inputs.spec.architecture
    )
    choices = {name: choice for name, choice in chosen.items() if name not in env}
    if choices and candidate.group:
        spec = candidate.inputs.spec
        choices |= expert_warmups.skipped_warmups(
            candidate.engine,
            candidate.group[0].capability,
            # A guessed family may have experts under names that no reader knows.
            has_experts=spec.experts is not None or bool(spec.guessed),
        )
    return choices


def _left_out(candidate: Candidate) -> list[str]:
    """The warning for variables of FITSERVE_ENGINE_ENV with this engine's prefix that it lacks."""
    engine, inputs = candidate.engine, candidate.inputs
    prefixes = candidate.rules.env_prefixes
    missing = [
        name
        for name in inputs.global_env
        if name.startswith(prefixes) and name not in inputs.wish.env
    ]
    return (
        [
            f"{', '.join(missing)} of FITSERVE_ENGINE_ENV is left out: {engine.ref} takes no such"
            " variable."
        ]
        if missing
        else []
    )


def _short_answers(candidate: Candidate, sizes: Sizes) -> list[str]:
    """The warning that the model's own files end answers early."""
    limit, args = candidate.inputs.spec.answer_limit, candidate.args
    if (
        limit is None
        or limit >= sizes.context.value
        or not candidate.rules.limits_answers
        or args.get("generation-config", "auto") != "auto"
        or "max_new_tokens" in str(args.get("override-generation-config", ""))
    ):
        return []
    return [
        f"Answers without `max_tokens` end after {limit} tokens: generation_config.json has"
        f' "max_new_tokens": {limit}, which {candidate.engine.ref} applies. --arg'
        " 'override-generation-config={\"max_new_tokens\": null}' lifts it."
    ]


def _parsers(candidate: Candidate) -> tuple[Choice[str], Choice[str]]:
    """The parser of tool calls, and that of thoughts."""
    writing, engine = candidate.inputs.writing, candidate.engine
    if writing is None:
        tools = reasoning = str_choice(NO_PARSER, "no table of parsers is at hand", "planner")
    else:
        tools, reasoning = writing.tool_parser(engine), writing.reasoning_parser(engine)
    chosen = {TOOLS: tools, REASONING: reasoning}
    for flag in chosen.keys() & candidate.args.keys():
        chosen[flag] = str_choice(str(candidate.args[flag]), "set by the user", "user")
    return chosen[TOOLS], chosen[REASONING]


def _reading(
    tools: Choice[str], reasoning: Choice[str], used: template.Chosen
) -> dict[str, Scalar]:
    """No part of a question: what makes prompts and reads the answers of a model does not change
    how it is computed."""
    reading_flags: dict[str, Scalar] = (
        {TOOLS: tools.value, "enable-auto-tool-choice": True} if tools.value != NO_PARSER else {}
    )
    reading_flags |= {template.FLAG: template.file_name(used.digest)} if used.digest else {}
    return reading_flags | ({REASONING: reasoning.value} if reasoning.value != NO_PARSER else {})


def _sleep_mode(candidate: Candidate, sizes: Sizes, env: Mapping[str, str]) -> Choice[bool]:
    inputs, ranks = candidate.inputs, max(1, len(candidate.group))
    evidence = (inputs.facts, sizes.scope, sizes.memory, ranks, inputs.hardware.ram_total_bytes)
    return sleep_mode.chosen(
        candidate.engine,
        inputs.sharing.leaves,
        candidate.args,
        env,
        *evidence,
        adapters=bool(inputs.adapters),
    )


def _asleep(candidate: Candidate, mode: Choice[bool]) -> dict[str, Scalar]:
    """No part of a question: who sleeps computes nothing. The words of clients that the engine's
    developers want in its log stay out of it."""
    quiet = {"log-error-stack": False} if "log-error-stack" in candidate.engine.flags else {}
    return {sleep_mode.FLAG: True, **quiet} if mode.value else {}


def _sleeping(candidate: Candidate, mode: Choice[bool]) -> dict[str, Choice[str]]:
    name, value = DEV_MODE
    reason = "opens /sleep and /wake_up; each request to the engine then needs its key"
    return (
        {name: str_choice(value, reason, f"profile {candidate.engine.ref}")} if mode.value else {}
    )


_NO_OVERRIDES = str_choice("none", "the engine's own choice of kernels is sound", "planner")


def _loras(candidate: Candidate) -> Choice[str]:
    """The adapters, with their bytes on each rank."""
    adapters, engine = candidate.inputs.adapters, candidate.engine
    if not adapters:
        return str_choice("none", "none was requested", "user")
    size = candidate.adapter_bytes
    rank = supported_rank(engine, adapters)
    room = f"room for rank {rank} in every layer: {words(size)} on each rank"
    return str_choice(
        ", ".join(f"{adapter.name} (rank {adapter.rank})" for adapter in adapters), room, "user"
    )


def _overrides(candidate: Candidate) -> Choice[str]:
    """The flags that keep the engine from a kernel of its own choice."""
    variant = candidate.variant
    words = [f"without {name}" for name in variant.disabled] + [
        f"--{flag}={value}" for flag, value in variant.backends
    ]
    reasons = [
        variant.reasons[name] for name in ("disabled", "backends") if name in variant.reasons
    ]
    if not words:
        return _NO_OVERRIDES
    reason = "; ".join(reason for reason, _ in reasons) or "set by the user"
    return str_choice(", ".join(words), reason, reasons[0][1] if reasons else "user")


def _all_reduce(candidate: Candidate, silent: Mapping[str, Fact]) -> Choice[bool]:
    if "disable-custom-all-reduce" in candidate.args:
        return bool_choice(
            not candidate.args["disable-custom-all-reduce"], "set by the user", "user"
        )
    span, group = candidate.inputs.span, candidate.group
    if span and candidate.variant.tp > span.gpus_each:
        return bool_choice(False, "GPUs of several nodes sum up over the network", "planner")
    # Ranks that share a layer are on one node.
    peers = group[: candidate.variant.tp] if span else group
    pair = candidate.inputs.unlinked_pair(peers)
    fact = silent.get(CUSTOM) or silent.get(P2P)
    if pair is None and fact is not None:
        return bool_choice(
            False, f"with it, the GPUs could not talk to each other here: {fact.source}", "fact"
        )
    if pair is None:
        reason = (
            "one device"
            if candidate.variant.tp * candidate.variant.dp == 1
            else "every pair has NVLink or working peer-to-peer access"
        )
        return bool_choice(True, reason, "probe")
    reason = f"GPUs {pair[0]} and {pair[1]} have neither NVLink nor proven peer-to-peer access"
    return bool_choice(False, reason, "probe")


# --- published weaknesses of the engine version ---


def advice(engine: Engine) -> str:
    """The weaknesses of this version and a version without them; "": none."""
    advisories = engine.advisories
    if not advisories:
        return ""
    ids = ", ".join(advisory.id for advisory in advisories[:_MOST_NAMED])
    rest = f" and {len(advisories) - _MOST_NAMED} more" if len(advisories) > _MOST_NAMED else ""
    fixes = [advisory.fixed_in for advisory in advisories if advisory.fixed_in]
    cure = f"from {max(fixes, key=release)} on it has none of them" if fixes else ""
    if len(fixes) < len(advisories):
        unfixed = len(advisories) - len(fixes)
        cure = f"of {unfixed} no fixed version is known"
    return f"Known weaknesses of {engine.ref}: {ids}{rest}; {cure}."
