"""Open questions of a decision, and the evidence and rule gaps in the answers of engines. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from gateway.domain import (
    AskedAttention,
    AskedKernel,
    Decision,
    EngineAnswer,
    EngineRef,
    LayerAttention,
    LayerKernel,
    OpenQuestions,
    Question,
    RuleGap,
    StartSettings,
)
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.refusal import RefusalError, VariantEvidence
from gateway.planner.rehearsed_start import build_start_settings

# Plans and refusals of one engine version in one inquiry: its import is the main cost.
_MAX_QUESTIONS = 4
# Relative difference of equal sizes: the rules take the fullest possible stage.
_TOLERANCE = 0.005
# Shorter requests decide no plan.
_MIN_LENGTH = 1024
_ASKED_REASON = "the engine's own code took it when asked"
_PATH = re.compile(r"(?<![\w.:/])~?/(?:[\w.@+-]+/)*[\w.@+-]+")
# Fields of config.json that decide how an engine builds the model. None names a file.
_SHAPES = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "kv_lora_rank",
)


def open_questions(decision: Decision) -> tuple[OpenQuestions, ...]:
    """The questions to each engine, best engine first. Empty: the best plan was checked.

    The questions are about its best plans, and about refusals that its answer may overrule. A later
    engine is asked if the earlier ones could not be.
    """
    questions_by_engine: dict[EngineRef, list[Question | None]] = {}
    starts: dict[Question, StartSettings] = {}
    refused_questions: dict[EngineRef, list[Question]] = {}
    for plan in decision.plans:
        questions_by_engine.setdefault(plan.engine, []).append(plan.question)
        if plan.question is not None:
            starts.setdefault(plan.question, build_start_settings(plan))
    for rejection in decision.rejected:
        if rejection.question is not None:
            refused_questions.setdefault(rejection.engine, []).append(rejection.question)
    questions = []
    for engine in dict.fromkeys([*questions_by_engine, *refused_questions]):
        plan_questions = questions_by_engine.get(engine, [])
        if plan_questions and plan_questions[0] is None:
            break
        unanswered = [
            *[question for question in plan_questions if question is not None][:_MAX_QUESTIONS],
            *refused_questions.get(engine, [])[:_MAX_QUESTIONS],
        ]
        open_ones = tuple(dict.fromkeys(unanswered))
        begun_starts = tuple(
            (question, starts[question]) for question in open_ones if question in starts
        )
        questions.append(OpenQuestions(engine, open_ones, begun_starts))
    return tuple(questions)


def read_evidence(answer: EngineAnswer, forecast: VariantEvidence) -> VariantEvidence:
    """The evidence in the answer of an engine; `forecast` is the evidence of the rules."""
    loaded_as = answer.resolved_settings.quantization if answer.resolved_settings else ""
    return VariantEvidence(
        kernels=tuple(
            _confirmed_kernel(asked_kernel, forecast.kernels, loaded_as or "unquantized")
            for asked_kernel in answer.kernels
        ),
        attention=tuple(
            _confirmed_attention(asked_attention, forecast.attention)
            for asked_attention in answer.attention
        ),
        memory=forecast.memory,
        method=loaded_as,
        answer=answer,
    )


def _confirmed_attention(
    asked_attention: AskedAttention, forecast: Sequence[LayerAttention]
) -> LayerAttention:
    """The attention as the engine answered, with refusals that only happen after the Python code of
    the start, by the rules."""
    for group in forecast:
        is_refused = group.status == "none" and any(
            refusal.is_at_start and refusal.kernel == asked_attention.backend
            for refusal in group.refusals
        )
        if is_refused and (group.kind, group.head_dim) == (
            asked_attention.kind,
            asked_attention.head_dim,
        ):
            return group.evolve(layers=asked_attention.layers)
    # Engines give recurrent layers no size of heads.
    head_dim = next((group.head_dim for group in forecast if group.kind == asked_attention.kind), 0)
    return LayerAttention(
        kind=asked_attention.kind,
        layers=asked_attention.layers,
        head_dim=asked_attention.head_dim or head_dim,
        backend=asked_attention.backend,
        status="ok",
        version=asked_attention.version or None,
        reason=_confirmed_reason(
            group.reason
            for group in forecast
            if (group.kind, group.backend) == (asked_attention.kind, asked_attention.backend)
        ),
    )


def _confirmed_kernel(
    asked_kernel: AskedKernel, forecast: Sequence[LayerKernel], loaded_as: str
) -> LayerKernel:
    """The kernel as the engine answered, with flaws by the rules: a crash at the first request, or
    slowness."""
    same_layer = [
        layer_kernel
        for layer_kernel in forecast
        if _module_name(layer_kernel.layer) == _module_name(asked_kernel.layer)
    ]
    # Only Python code gave the answer: refusals at a start still hold for this kernel.
    for layer_kernel in same_layer:
        is_refused = layer_kernel.status == "none" and any(
            refusal.is_at_start and refusal.kernel == asked_kernel.kernel
            for refusal in layer_kernel.refusals
        )
        if is_refused and (layer_kernel.k, layer_kernel.n) == (asked_kernel.k, asked_kernel.n):
            return layer_kernel.evolve(layer=asked_kernel.layer, count=asked_kernel.count)
    same_kernel = [
        layer_kernel for layer_kernel in same_layer if layer_kernel.kernel == asked_kernel.kernel
    ]
    # The two products of experts are one row here, so the product that fails counts.
    known_kernel = next(
        (layer_kernel for layer_kernel in same_kernel if layer_kernel.status != "ok"),
        same_kernel[0] if same_kernel else None,
    )
    return LayerKernel(
        layer=asked_kernel.layer,
        count=asked_kernel.count,
        k=asked_kernel.k,
        n=asked_kernel.n,
        scheme=same_layer[0].scheme if same_layer else loaded_as,
        kernel=asked_kernel.kernel,
        status=known_kernel.status if known_kernel else "ok",
        padded_to=known_kernel.padded_to if known_kernel and not asked_kernel.experts else None,
        note=known_kernel.note if known_kernel else "",
        reason=_confirmed_reason(layer_kernel.reason for layer_kernel in same_kernel),
    )


def _confirmed_reason(reasons: Iterable[str]) -> str:
    """The first reason of the rules for the same choice, and that the engine confirmed it."""
    rule_reason = next(iter(reasons), "")
    return "; ".join(filter(None, [rule_reason, _ASKED_REASON]))


def gaps(
    question: Question, candidate: Candidate, refusal: RefusalError | None, answer: EngineAnswer
) -> tuple[RuleGap, ...]:
    """The contradictions between the rules and the engine, for one variant.

    refusal: the refusal by the rules, which then forecast nothing.
    """
    rows = _differences(candidate, refusal, answer)
    settings = (*(f"{name}={value}" for name, value in question.env), *question.argv)
    argv = tuple(_drop_paths(setting) for setting in settings)
    return tuple(
        RuleGap(
            engine=question.engine,
            rules=candidate.engine.guessed_from or candidate.engine.ref,
            source=answer.source,
            capability=question.capability,
            model=signature(candidate),
            argv=argv,
            subject=subject,
            forecast=_drop_paths(forecasted),
            answer=_drop_paths(engine_answer),
        )
        for subject, forecasted, engine_answer in rows
    )


def _differences(
    candidate: Candidate, refusal: RefusalError | None, answer: EngineAnswer
) -> Iterator[tuple[str, str, str]]:
    """Rows of subject, forecast of the rules, answer of the engine."""
    evidence = candidate.evidence
    no_kernels = [
        f"no kernel for {layer_kernel.layer}"
        for layer_kernel in evidence.kernels
        if layer_kernel.status == "none"
    ]
    no_kernels += [
        f"no backend for {layer_attention.kind} attention"
        for layer_attention in evidence.attention
        if layer_attention.status == "none"
    ]
    ruled_out = str(refusal) if refusal else "; ".join(no_kernels)
    if ruled_out or answer.refusal_text:
        if bool(ruled_out) != bool(answer.refusal_text):
            yield "refusal", ruled_out or "loads", answer.refusal_text or "loads"
        return
    known_layers = {
        _layer_name(layer_kernel.layer)
        for layer_kernel in evidence.kernels
        if layer_kernel.status != "unknown"
    }
    yield from _contradictions(
        "kernel",
        _kernels_by_layer(evidence.kernels),
        _kernels_by_layer(answer.kernels),
        known_layers,
    )
    known_kinds = {
        _group_name(layer_attention)
        for layer_attention in evidence.attention
        if layer_attention.status != "unknown"
    }
    yield from _contradictions(
        "attention",
        _backends_by_group(evidence.attention),
        _backends_by_group(answer.attention),
        known_kinds,
    )
    if evidence.kernels or not candidate.inputs.spec.quant:
        yield from _size_differences(candidate, answer)


def _size_differences(candidate: Candidate, answer: EngineAnswer) -> Iterator[tuple[str, str, str]]:
    try:
        weights_bytes = candidate.weights_bytes() - candidate.speculation.weights_bytes
        cache = candidate.cache
    except RefusalError:  # the rules say nothing of it, so that nothing is contradicted
        return
    # The parameters of the engine are those from before its quantization.
    online = candidate.variant.quantization and candidate.inputs.spec.quant is None
    if not online and _are_different(weights_bytes, answer.weights):
        yield "weights", f"{weights_bytes} bytes on a rank", f"{answer.weights} bytes on a rank"
    for length, needed_bytes in (
        [(n, size) for n, size in answer.kv.needed if n >= _MIN_LENGTH] if answer.kv else ()
    ):
        batched = answer.resolved_settings.max_num_batched_tokens if answer.resolved_settings else 0
        if _are_different(forecast_bytes := cache.bytes_for(length, batched), needed_bytes):
            yield (
                "KV cache",
                f"{forecast_bytes} bytes for a request of {length} tokens",
                f"{needed_bytes} bytes",
            )
            return


def _are_different(forecast: int, answer: int) -> bool:
    return abs(forecast - answer) > _TOLERANCE * max(forecast, answer)


def _contradictions(
    subject: str,
    forecast: dict[str, set[str]],
    answer: dict[str, set[str]],
    predicted: set[str],
) -> Iterator[tuple[str, str, str]]:
    for name in sorted(predicted & answer.keys()):
        # The engine names the backend of a tower without its version.
        unversioned = {backend.rstrip("234") for backend in forecast[name]}
        if answer[name] not in (forecast[name], unversioned):
            yield (
                f"{subject} of {name}",
                ", ".join(sorted(forecast[name])),
                ", ".join(sorted(answer[name])),
            )


def _kernels_by_layer(kernels: Iterable[LayerKernel | AskedKernel]) -> dict[str, set[str]]:
    kernels_by_layer: dict[str, set[str]] = {}
    for kernel in kernels:
        kernels_by_layer.setdefault(_layer_name(kernel.layer), set()).add(kernel.kernel or "none")
    return kernels_by_layer


def _layer_name(name: str) -> str:
    return name.rpartition(".")[2]


def _backends_by_group(attention: Iterable[LayerAttention | AskedAttention]) -> dict[str, set[str]]:
    backends_by_group: dict[str, set[str]] = {}
    for group in attention:
        backends_by_group.setdefault(_group_name(group), set()).add(
            f"{group.backend}{group.version or ''}"
        )
    return backends_by_group


def _group_name(group: LayerAttention | AskedAttention) -> str:
    return f"{group.kind} layers of head size {group.head_dim}"


def signature(candidate: Candidate) -> str:
    """The model as far as an engine's choices follow from it, without its name and its place."""
    spec = candidate.inputs.spec
    config = {**spec.config, **(spec.config.get("text_config") or {})}
    shapes = [
        f"{name}={config[name]}"
        for name in _SHAPES
        if isinstance(config.get(name), (int, str)) and config[name]
    ]
    quant = [
        f"{name}={value}"
        for name, value in (spec.quant.fields if spec.quant else {}).items()
        if isinstance(value, (int, str))
    ]
    return ", ".join(
        [
            spec.architecture,
            *shapes,
            *([f"quantized: {spec.quant.method}"] if spec.quant else []),
            *quant,
        ]
    )


def _drop_paths(text: str) -> str:
    return _PATH.sub("PATH", text)


def _module_name(layer: str) -> str:
    return layer.removesuffix(".w13").removesuffix(".w2").rpartition(".")[2]
