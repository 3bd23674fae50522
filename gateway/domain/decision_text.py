"""A decision as plain text for `print`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gateway.domain.decision_html import MAX_PLANS, PLAN_HEAD, limit_words, plan_rows
from gateway.domain.units import gib

if TYPE_CHECKING:
    from gateway.domain.decision import Decision
    from gateway.domain.plan import Plan


def decision_text(decision: Decision) -> str:
    """The reasons for the number of GPUs, the plans, and the start of the first; or the refusal."""
    lines = [f"{decision.model} on {decision.hardware}"]
    if not decision.plans:
        lines += decision.refusal or ("No plan.",)
        return "\n".join(lines)
    lines += [words for words in (decision.gpu_choice, decision.why_gpus) if words]
    lines += ["", *_table(PLAN_HEAD, plan_rows(decision.plans))]
    if limit := limit_words(decision.plans, MAX_PLANS):
        lines.append(f"{len(decision.plans)} plans{limit}.")
    lines += ["", *_start_lines(decision.plans[0])]
    if decision.rejected:
        lines.append(f"{len(decision.rejected)} rejected: see .rejected")
    return "\n".join(lines)


def _start_lines(plan: Plan) -> list[str]:
    """The memory and the flags of the first plan."""
    memory = plan.memory
    sizes = f"weights {gib(memory.weights_bytes)}, KV cache {gib(memory.kv_bytes)}"
    return [f"First plan: {sizes} on each device", " ".join(plan.argv)]


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table in columns."""
    cells = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
