"""Which questions a decision leaves open, and what an engine's own answer makes of the evidence that the rules forecast. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gateway.core.engines.evidence import Evidence
from gateway.domain import AskedKernel, Decision, EngineAnswer, EngineRef, LayerAttention, LayerKernel, Question

# Plans, and refusals, of one engine version that are asked about together: its import is what costs.
_AT_ONCE = 4


def open_questions(decision: Decision, dead: Collection[str] = ()) -> tuple[EngineRef, list[Question]] | None:
    """The engine to ask next, and what: about its best plans, and about the refusals that its answer may overrule. None: the best
    plan was checked, or no engine that could be asked (`dead`: those that could not) knows more."""
    plans = [plan for plan in decision.plans if str(plan.engine) not in dead]
    if plans and plans[0].question is None:
        return None
    refused = [one for one in decision.rejected if one.question is not None and str(one.engine) not in dead]
    engine = plans[0].engine if plans else refused[0].engine if refused else None
    if engine is None:
        return None
    best = [plan.question for plan in plans if plan.engine == engine and plan.question is not None]
    ruled_out = [one.question for one in refused if one.engine == engine and one.question is not None]
    return engine, list(dict.fromkeys([*best[:_AT_ONCE], *ruled_out[:_AT_ONCE]]))


def evidence_of(answer: EngineAnswer, forecast: Evidence) -> Evidence:
    """The evidence that the engine gave itself; `forecast` is that of the rules."""
    loaded = answer.settled.quantization if answer.settled else ""
    return Evidence(
        kernels=tuple(_kernel(row, forecast.kernels, loaded or "unquantized") for row in answer.kernels),
        attention=tuple(
            LayerAttention(
                kind=row.kind,
                layers=row.layers,
                head_dim=row.head_dim,
                backend=row.backend,
                status="ok",
                version=row.version or None,
            )
            for row in answer.attention
        ),
        memory=forecast.memory,
        method=loaded,
        answer=answer,
    )


def _kernel(row: AskedKernel, forecast: Sequence[LayerKernel], loaded: str) -> LayerKernel:
    """The row, with what the rules know of this kernel beyond its choice: that it crashes at the first request, or is slow."""
    same = next((one for one in forecast if one.layer.rpartition(".")[2] == row.layer.rpartition(".")[2]), None)
    known = same if same is not None and same.kernel == row.kernel else None
    return LayerKernel(
        layer=row.layer,
        count=row.count,
        k=row.k,
        n=row.n,
        scheme=same.scheme if same else loaded,
        kernel=row.kernel,
        status=known.status if known else "ok",
        padded_to=known.padded_to if known else None,
        note=known.note if known else "",
    )
