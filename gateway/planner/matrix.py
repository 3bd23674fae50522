"""A matrix of engine versions, models and machines, with one cell for each decision. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from gateway.domain import Decision, EngineRef, RejectedPlan, Value

# Refusals that say more about the number of GPUs than about the engine; shown only where no other
# refusal can be shown.
_COUNT_VERDICTS = ("no_device", "illegal_parallelism")


class Cell(Value):
    """The decision for one model, machine and engine version.

    `state`: ok, degraded (it runs, but slower or not as sure as it should), or failing with the
    verdict of the gate. `tokens_s` is the expected speed of a single request; None: unknown.
    """

    model: str
    hardware: str
    engine: EngineRef
    state: Literal["ok", "degraded", "failing"]
    verdict: str
    tensor_parallel: int
    pipeline_parallel: int = 1
    max_model_len: int | None = None
    tokens_s: float | None = None
    why: str = ""


def cells(decision: Decision, engines: Iterable[str]) -> list[Cell]:
    """A cell for each of these engines ("kind==version"): its best plan, or the refusal that says
    most."""
    matrix_cells = []
    for engine in engines:
        pair_fields = {"model": decision.model, "hardware": decision.hardware}
        plan = next((plan for plan in decision.plans if str(plan.engine) == engine), None)
        if plan is not None:
            reason = " ".join(plan.warnings)
            sizes = {
                "tensor_parallel": plan.tensor_parallel.value,
                "pipeline_parallel": plan.pipeline_parallel.value,
            }
            matrix_cells.append(
                Cell(
                    **pair_fields,
                    **sizes,
                    engine=plan.engine,
                    state=plan.verdict,
                    verdict=plan.verdict,
                    max_model_len=plan.max_model_len.value,
                    tokens_s=plan.speed.stream.value if plan.speed is not None else None,
                    why=reason,
                )
            )
        elif rejections := [
            rejection for rejection in decision.rejected if str(rejection.engine) == engine
        ]:
            main_refusal = _main_refusal(rejections)
            matrix_cells.append(
                Cell(
                    **pair_fields,
                    engine=main_refusal.engine,
                    state="failing",
                    verdict=main_refusal.verdict,
                    tensor_parallel=main_refusal.tensor_parallel,
                    pipeline_parallel=main_refusal.pipeline_parallel,
                    why="; ".join(main_refusal.reasons),
                )
            )
    return matrix_cells


def _main_refusal(rejections: list[RejectedPlan]) -> RejectedPlan:
    """The refusal with the most ranks that is not about their number: nothing smaller helped
    either."""
    return max(
        rejections,
        key=lambda rejection: (
            rejection.verdict not in _COUNT_VERDICTS,
            rejection.tensor_parallel,
            rejection.pipeline_parallel,
        ),
    )
