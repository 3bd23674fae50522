"""What an engine's own answer makes of the evidence that the rules forecast. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.engines.evidence import Evidence
from gateway.core.engines.refusal import Refused
from gateway.domain import Answer, AskedKernel, LayerAttention, LayerKernel


def evidence_of(answer: Answer, forecast: Evidence) -> Evidence:
    """The evidence that the engine gave itself; `forecast` is that of the rules. Raises Refused with the engine's own words."""
    if answer.refused:
        raise Refused("engine_refuses", answer.refused, answer.source, evidence=forecast)
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
