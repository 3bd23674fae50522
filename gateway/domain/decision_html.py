"""A decision as HTML for notebooks, and as text for `print`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from gateway.domain.choice import Choice
from gateway.domain.units import gib

if TYPE_CHECKING:
    from gateway.domain.decision import Decision, RejectedPlan
    from gateway.domain.plan import Plan

_MAX_PLANS = 12
_MAX_REFUSALS = 8
_PLAN_HEAD = ("rank", "engine", "GPUs", "copies", "context", "tokens/s alone", "tokens/s in all")


def decision_html(decision: Decision) -> str:
    """The first plan with its reasons, the other plans, and the refusals. All texts are escaped."""
    parts = [f"<p><b>{_escaped_text(decision.model)}</b> on {_escaped_text(decision.hardware)}</p>"]
    if decision.plans:
        parts += [
            f"<p>{_escaped_text(reason)}</p>"
            for reason in (decision.gpu_choice, decision.why_gpus)
            if reason
        ]
        parts += [_plans_table(decision.plans), _choices_table(decision.plans[0])]
    else:
        parts += [f"<p>{_escaped_text(line)}</p>" for line in decision.refusal or ("No plan.",)]
    if decision.rejected:
        rows = [
            (str(rejection.engine), _layout(rejection), rejection.verdict, rejection.reasons[0])
            for rejection in decision.rejected[:_MAX_REFUSALS]
        ]
        table = _html_table(("engine", "layout", "refused by", "reason"), rows)
        title = f"{len(decision.rejected)} rejected{_limit_words(decision.rejected, len(rows))}"
        parts.append(f"<details><summary>{title}</summary>{table}</details>")
    return "\n".join(parts)


def _limit_words(rows: Sequence[object], count: int) -> str:
    """The words on rows that a table leaves out; "": it has all."""
    return f", of which {count} are shown" if len(rows) > count else ""


def _layout(rejection: RejectedPlan) -> str:
    """`TP=2 PP=2`: ranks of a layer, stages, and groups of ranks."""
    parts = (("PP", rejection.pipeline_parallel), ("DP", rejection.data_parallel))
    further = [f"{name}={count}" for name, count in parts if count > 1]
    return " ".join([f"TP={rejection.tensor_parallel}", *further])


def _plan_rows(plans: Sequence[Plan]) -> list[tuple[object, ...]]:
    """A row of cells for each of the first plans."""
    return [
        (
            plan.rank,
            str(plan.engine),
            len(plan.gpus) or "CPU",
            plan.replicas.value,
            f"{plan.max_model_len.value:,}",
            f"{plan.speed.stream.value:,g}" if plan.speed else "unknown",
            f"{plan.speed.total.value:,g}" if plan.speed else "unknown",
        )
        for plan in plans[:_MAX_PLANS]
    ]


def _plans_table(plans: Sequence[Plan]) -> str:
    words = _limit_words(plans, _MAX_PLANS)
    table = _html_table(_PLAN_HEAD, _plan_rows(plans))
    return table + (f"<p>{len(plans)} plans{words}.</p>" if words else "")


def _choices_table(plan: Plan) -> str:
    """The choices of a plan with their reasons."""
    choices = [
        (name.replace("_", " "), choice)
        for name in type(plan).model_fields
        if isinstance(choice := getattr(plan, name), Choice)
    ]
    choices += list(plan.variables.items())
    rows = [(name, choice.value, f"{choice.reason} ({choice.source})") for name, choice in choices]
    backends = Counter(
        (
            f"attention {layer_attention.kind}",
            f"{layer_attention.backend or layer_attention.status} {layer_attention.version or ''}",
            layer_attention.reason,
        )
        for layer_attention in plan.attention
        for _ in range(layer_attention.layers)
    )
    kernels = Counter(
        ("kernel", layer_kernel.kernel or layer_kernel.status, layer_kernel.reason)
        for layer_kernel in plan.kernels
        for _ in range(layer_kernel.count)
    )
    for (name, value, reason), count in (backends + kernels).items():
        rows.append((f"{name} x{count}", value, reason))
    table = _html_table(("choice", "value", "reason"), rows)
    return f"<details><summary>Reasons of the first plan</summary>{table}</details>"


def _html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    titles = "".join(f"<th>{_escaped_text(title)}</th>" for title in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{_escaped_text(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _escaped_text(value: object) -> str:
    return escape(str(value))


def decision_text(decision: Decision) -> str:
    """The reasons for the number of GPUs, the plans, and the start of the first; or the refusal."""
    lines = [f"{decision.model} on {decision.hardware}"]
    if not decision.plans:
        lines += decision.refusal or ("No plan.",)
        return "\n".join(lines)
    lines += [words for words in (decision.gpu_choice, decision.why_gpus) if words]
    lines += ["", *_columns(_PLAN_HEAD, _plan_rows(decision.plans))]
    if limit := _limit_words(decision.plans, _MAX_PLANS):
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


def _columns(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table in columns."""
    cells = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
