"""Which questions a decision leaves open, what an engine's own answer makes of the evidence that
the rules forecast, and where the two
contradict each other. Pure."""

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
)
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.evidence import Evidence
from gateway.engines.common.refusal import Refused
from gateway.planner.sizing import weights

# Plans, and refusals, of one engine version that are asked about together: its import is what
# costs.
_AT_ONCE = 4
# Sizes nearer than this are alike: of stages the rules take the fullest that could be.
_ALIKE = 0.005
# Requests that are shorter decide no plan.
_LEAST_LENGTH = 1024
_PATH = re.compile(r"(?<![\w.:/])~?/(?:[\w.@+-]+/)*[\w.@+-]+")
# What of config.json decides what an engine makes of a model. It names nobody's files.
_SHAPES = (
    *(
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *(
        "head_dim",
        "sliding_window",
        "num_experts",
        "n_routed_experts",
        "num_local_experts",
        "moe_intermediate_size",
    ),
    "kv_lora_rank",
)


def open_questions(decision: Decision) -> tuple[OpenQuestions, ...]:
    """The engines to ask, one where the one before could not be asked; and what: about its best
    plans, and about the refusals that its
    answer may overrule. Empty: the best plan was checked, or no engine knows more."""
    best: dict[EngineRef, list[Question | None]] = {}
    refused: dict[EngineRef, list[Question]] = {}
    for plan in decision.plans:
        best.setdefault(plan.engine, []).append(plan.question)
    for one in decision.rejected:
        if one.question is not None:
            refused.setdefault(one.engine, []).append(one.question)
    found = []
    for engine in dict.fromkeys([*best, *refused]):
        plans = best.get(engine, [])
        if plans and plans[0] is None:
            break
        asked = [
            *[one for one in plans if one is not None][:_AT_ONCE],
            *refused.get(engine, [])[:_AT_ONCE],
        ]
        found.append(OpenQuestions(engine, tuple(dict.fromkeys(asked))))
    return tuple(found)


def evidence_of(answer: EngineAnswer, forecast: Evidence) -> Evidence:
    """The evidence that the engine gave itself; `forecast` is that of the rules."""
    loaded = answer.settled.quantization if answer.settled else ""
    return Evidence(
        kernels=tuple(
            _kernel(row, forecast.kernels, loaded or "unquantized") for row in answer.kernels
        ),
        attention=tuple(_attention(row, forecast.attention) for row in answer.attention),
        memory=forecast.memory,
        method=loaded,
        answer=answer,
    )


def _attention(row: AskedAttention, forecast: Sequence[LayerAttention]) -> LayerAttention:
    """The row; with what the rules know of refusals that come after the start's Python code."""
    for one in forecast:
        refused = one.status == "none" and any(
            no.at_start and no.kernel == row.backend for no in one.refused
        )
        if refused and (one.kind, one.head_dim) == (row.kind, row.head_dim):
            return one.evolve(layers=row.layers)
    return LayerAttention(
        kind=row.kind,
        layers=row.layers,
        head_dim=row.head_dim,
        backend=row.backend,
        status="ok",
        version=row.version or None,
    )


def _kernel(row: AskedKernel, forecast: Sequence[LayerKernel], loaded: str) -> LayerKernel:
    """The row, with what the rules know of this kernel beyond its choice: that it crashes at the
    first request, or is slow."""
    same = [one for one in forecast if _name(one.layer) == _name(row.layer)]
    # Asked is Python code alone: what the rules know of refusals at a start holds for the kernel
    # that the engine chose.
    for one in same:
        refused = one.status == "none" and any(
            no.at_start and no.kernel == row.kernel for no in one.refused
        )
        if refused and (one.k, one.n) == (row.k, row.n):
            return one.evolve(layer=row.layer, count=row.count)
    alike = [one for one in same if one.kernel == row.kernel]
    # Of the two products of experts, which are one row here, the one that fails counts.
    known = next((one for one in alike if one.status != "ok"), alike[0] if alike else None)
    return LayerKernel(
        layer=row.layer,
        count=row.count,
        k=row.k,
        n=row.n,
        scheme=same[0].scheme if same else loaded,
        kernel=row.kernel,
        status=known.status if known else "ok",
        padded_to=known.padded_to if known and not row.experts else None,
        note=known.note if known else "",
    )


def gaps(
    question: Question, forecast: Candidate, refusal: Refused | None, answer: EngineAnswer
) -> tuple[RuleGap, ...]:
    """What the rules said otherwise than the engine of one variant. refusal: why the rules forecast
    nothing of it."""
    found = _differences(forecast, refusal, answer)
    return tuple(
        RuleGap(
            engine=question.engine,
            rules=forecast.engine.guessed_from or forecast.engine.ref,
            source=answer.source,
            capability=question.capability,
            model=signature(forecast),
            argv=tuple(
                _without_paths(one)
                for one in (*(f"{name}={value}" for name, value in question.env), *question.argv)
            ),
            about=about,
            forecast=_without_paths(said),
            answer=_without_paths(asked),
        )
        for about, said, asked in found
    )


def _differences(
    forecast: Candidate, refusal: Refused | None, answer: EngineAnswer
) -> Iterator[tuple[str, str, str]]:
    """What about, what the rules said, what the engine said."""
    evidence = forecast.evidence
    none = [f"no kernel for {row.layer}" for row in evidence.kernels if row.status == "none"]
    none += [
        f"no backend for {row.kind} attention" for row in evidence.attention if row.status == "none"
    ]
    ruled_out = str(refusal) if refusal else "; ".join(none)
    if ruled_out or answer.refused:
        if bool(ruled_out) != bool(answer.refused):
            yield "refusal", ruled_out or "loads", answer.refused or "loads"
        return
    known = {_layer(row.layer) for row in evidence.kernels if row.status != "unknown"}
    yield from _unlike("kernel", _kernels(evidence.kernels), _kernels(answer.kernels), known)
    known = {_kind(row) for row in evidence.attention if row.status != "unknown"}
    yield from _unlike(
        "attention", _backends(evidence.attention), _backends(answer.attention), known
    )
    if evidence.kernels or not forecast.given.spec.quant:
        yield from _sizes(forecast, answer)


def _sizes(forecast: Candidate, answer: EngineAnswer) -> Iterator[tuple[str, str, str]]:
    try:
        held = weights(forecast) - forecast.speculation.weights_bytes
        cache = forecast.cache
    except Refused:  # the rules say nothing of it, so that nothing is contradicted
        return
    online = (
        forecast.variant.quantization and forecast.given.spec.quant is None
    )  # the engine's parameters are those from before
    if not online and _differ(held, answer.weights):
        yield "weights", f"{held} bytes on a rank", f"{answer.weights} bytes on a rank"
    for length, needed in (
        [(n, size) for n, size in answer.kv.needed if n >= _LEAST_LENGTH] if answer.kv else ()
    ):
        batched = answer.settled.max_num_batched_tokens if answer.settled else 0
        if _differ(said := cache.bytes_for(length, batched), needed):
            yield "KV cache", f"{said} bytes for a request of {length} tokens", f"{needed} bytes"
            return


def _differ(said: int, asked: int) -> bool:
    return abs(said - asked) > _ALIKE * max(said, asked)


def _unlike(
    about: str, said: dict[str, set[str]], asked: dict[str, set[str]], known: set[str]
) -> Iterator[tuple[str, str, str]]:
    for name in sorted(known & asked.keys()):
        # Of a tower the engine names the backend without its version.
        if said[name] != asked[name] and {one.rstrip("234") for one in said[name]} != asked[name]:
            yield (
                f"{about} of {name}",
                ", ".join(sorted(said[name])),
                ", ".join(sorted(asked[name])),
            )


def _kernels(rows: Iterable[LayerKernel | AskedKernel]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(_layer(row.layer), set()).add(row.kernel or "none")
    return found


def _layer(name: str) -> str:
    return name.rpartition(".")[2]


def _backends(rows: Iterable[LayerAttention | AskedAttention]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(_kind(row), set()).add(f"{row.backend}{row.version or ''}")
    return found


def _kind(row: LayerAttention | AskedAttention) -> str:
    return f"{row.kind} layers of head size {row.head_dim}"


def signature(forecast: Candidate) -> str:
    """The model as far as an engine's choices follow from it, without its name and its place."""
    spec = forecast.given.spec
    config = {**spec.config, **(spec.config.get("text_config") or {})}
    shapes = [
        f"{name}={config[name]}"
        for name in _SHAPES
        if isinstance(config.get(name), (int, str)) and config[name]
    ]
    quant = [
        f"{name}={value}"
        for name, value in (spec.quant.config if spec.quant else {}).items()
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


def _without_paths(words: str) -> str:
    return _PATH.sub("PATH", words)


def _name(layer: str) -> str:
    return layer.removesuffix(".w13").removesuffix(".w2").rpartition(".")[2]
