"""Plans for people, with the words of `planner/explain.py`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.cli.terminal import line_width as _width
from gateway.cli.terminal import say
from gateway.cli.text_tables import drop_column, print_paragraph, print_table
from gateway.visible import visible_line

if TYPE_CHECKING:
    from gateway.engines.common.kernels.cards import Card

CHECK_OMISSION = "The check before the start leaves out"


class PlanRows(NamedTuple):
    """The rows of a plan to print.

    is_full: defaults, layers and limits too.
    option: the command-line option that prints the rows.
    """

    is_full: bool
    option: str = "--all"


SHORT_DETAIL = PlanRows(is_full=False)
FULL_DETAIL = PlanRows(is_full=True)


def show_decision(decision: Any, *, as_json: bool, detail: PlanRows = SHORT_DETAIL) -> None:
    """Print a decision: as JSON, or its first plan, other shapes and rejected candidates."""
    from gateway.planner import explain

    if as_json:
        say(decision.model_dump_json(by_alias=True, indent=2))
        return
    print_paragraph(explain.headline(decision))
    for offer_text in explain.offer_words(decision):
        print_paragraph(f"Before its start {offer_text}.")
    if decision.wait_reason:
        print_paragraph(decision.wait_reason)
    if decision.gpu_choice:
        print_paragraph(decision.gpu_choice)
    if decision.plans:
        show_plan(decision.plans[0], decision.why_gpus, decision.start, detail)
        _show_nodes(decision)
    else:
        for line in decision.refusal:
            print_paragraph(line, indent=4 if line.startswith("  ") else 0)
    if missing_parts := explain.unavailable_gains(decision):
        say("\nEngines that are not installed")
        for line in missing_parts:
            print_paragraph(line, indent=4, first="  ")
    if len(decision.plans) > 1:
        rows = explain.shapes(decision.plans)
        count_note = f", the first {_MAX_SHAPES} of {len(rows)}" if len(rows) > _MAX_SHAPES else ""
        say(f"\nPlans by shape (RANK: the best plan of the shape{count_note})")
        head = ("RANK", "GPUS", "LAYOUT", "CONTEXT", "TOK/S", "IN ALL", "ENGINES")
        print_table(head, rows[:_MAX_SHAPES])
    if decision.rejected and decision.plans and not detail.is_full:
        counts = explain.rejected_counts(decision.rejected)
        say("")
        print_paragraph(f"Rejected: {counts}. `{detail.option}` shows the reasons.")
    elif decision.rejected:
        _show_rejections(decision.rejected)


def show_decisions(
    decisions: list[Any],
    machine: Any,
    advice: str,
    *,
    as_json: bool,
    detail: PlanRows = SHORT_DETAIL,
) -> None:
    """Print the decisions for models that share a machine: a table of all, then each."""
    from gateway.planner import explain

    if as_json:
        documents = [json.loads(decision.model_dump_json(by_alias=True)) for decision in decisions]
        say(json.dumps(documents, indent=2))
        return
    head = ("MODEL", "ENGINE", "DEVICES", "CONTEXT", "MEMORY")
    models = [decision.model for decision in decisions]
    rows = [
        (_short_name(decision.model, models), *explain.placement_row(decision, machine))
        for decision in decisions
    ]
    print_table(head, rows)
    if advice:
        print_paragraph(advice)
    for decision in decisions:
        say("")
        show_decision(decision, as_json=False, detail=detail)


def _show_rejections(rejections: Any) -> None:
    from gateway.planner import explain

    say("\nRejected")
    for rejection in explain.rejections(rejections):
        print_paragraph(f"{rejection.verdict}: {rejection.candidates}", indent=4, first="  ")
        for line in rejection.lines:
            indent = "      " if line.startswith(" ") else "    "
            print_paragraph(line.strip(), indent=len(indent) + 2, first=indent)


_MAX_SHAPES = 8


def _show_nodes(decision: Any) -> None:
    """Print the node of every rank; nothing of one machine."""
    plan = decision.plans[0]
    if not plan.nodes:
        return
    from gateway.planner.nodes.words import node_rows

    say("\nNodes")
    rows = node_rows(plan)
    count_note = f"{len(rows) - _MAX_ROWS} more; --json has all" if len(rows) > _MAX_ROWS else ""
    print_table(("COPY", "NODE", "RANKS", "GPUS", "PORTS"), rows[:_MAX_ROWS])
    for line in (count_note, decision.why_nodes):
        if line:
            print_paragraph(f"{line}.", indent=2, first="  ")
    if plan.span == 1:
        return
    say("\nFlags of each node, after those of the engine")
    for node_ranks in plan.nodes[:_MAX_ROWS]:
        command_words = [
            *(f"{name}={shlex.quote(value)}" for name, value in node_ranks.env.items()),
            *node_ranks.argv,
        ]
        say(visible_line(f"{node_ranks.node}: {' '.join(command_words)}"))


_MAX_ROWS = 16


def show_matrix(cells: Any, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps([cell.model_dump() for cell in cells], indent=2))
        return
    reasons: list[str] = [""]
    rows = [
        (
            _short_name(cell.model, [neighbour.model for neighbour in cells]),
            cell.hardware,
            str(cell.engine),
            cell.state if cell.state != "failing" else cell.verdict,
            f"TP={cell.tensor_parallel}"
            + (f" PP={cell.pipeline_parallel}" if cell.pipeline_parallel > 1 else ""),
            "" if cell.max_model_len is None else f"{cell.max_model_len:,}",
            "" if cell.tokens_s is None else f"{cell.tokens_s:,g}",
            _shorten_repeat(cell.why, reasons),
        )
        for cell in cells
    ]
    head = ("MODEL", "HARDWARE", "ENGINE", "STATE", "LAYOUT", "CONTEXT", "TOK/S", "WHY")
    table = drop_column(head, rows, "LAYOUT", ("TP=1",))
    print_table(*drop_column(*table, "WHY", ("",)))


def show_hardware_names(machines: Iterable[str], cards: Iterable[Card]) -> None:
    """Print the machines and cards that `--hardware` knows by name."""
    from gateway.domain.units import gib

    print_paragraph(f"Machines: {', '.join(machines)}", indent=10)
    say()
    rows = [
        (card.name, gib(card.memory_mib << 20) if card.memory_mib else "the host's")
        for card in cards
    ]
    print_table(("CARD", "MEMORY"), rows)
    say()
    print_paragraph(
        "A card's own words are enough, with a count: h100, 6x4090, 'rtx pro 6000', a100-80g,"
        " 3090+4090. Several machines: 2xgb10, 2x(8xh100)."
    )


def _shorten_repeat(text: str, reasons: list[str]) -> str:
    """The text, or "as above" in a terminal if the row before has the same. reasons: of all rows
    so far; the text is added."""
    reasons.append(text)
    return "as above" if text and text == reasons[-2] and _width() else text


def _short_name(model: str, models: list[str]) -> str:
    """The last part of a model's path, or the whole path where several models share that part."""
    last = model.rstrip("/").rpartition("/")[2]
    return (
        model
        if any(
            neighbour != model and neighbour.rstrip("/").endswith(f"/{last}")
            for neighbour in models
        )
        else last
    )


def show_plan(
    plan: Any, why_gpus: str = "", start: Any = None, detail: PlanRows = SHORT_DETAIL
) -> None:
    """Print a plan: speed, memory, choices, flags. why_gpus, start: of its decision."""
    _show_speed(plan)
    _show_memory(plan, detail)
    _show_choices(plan, why_gpus, start.conditions.origin if start is not None else None, detail)
    from gateway.planner import explain

    if start is not None:
        grade = f" ({start.time.grade})" if start.time else ": unknown"
        say(f"\nExpected start{grade}")
        print_table(("", ""), explain.start_rows(start))
    if plan.warnings:
        say("")
    for warning in plan.warnings:
        print_paragraph(f"warning: {warning}", indent=4)
    if plan.advice:
        say("")
        print_paragraph(f"advice: {plan.advice}", indent=4)
    if plan.unrehearsed:
        say(f"\n{CHECK_OMISSION}")
    for stage in plan.unrehearsed:
        print_paragraph(stage, indent=2, first="  ")
    setting_texts = [
        *(f"{name}={shlex.quote(value)}" for name, value in plan.env.items()),
        shlex.join(plan.argv),
    ]
    say("\nEngine flags")
    # Never wrapped, so that users can copy the line.
    say(visible_line(" ".join(setting_texts)))


def _show_speed(plan: Any) -> None:
    from gateway.planner import explain

    if plan.speed:
        say(
            "\nMeasured speed"
            if plan.speed.grade == "measured"
            else f"\nExpected speed ({plan.speed.grade})"
        )
        print_table(("", ""), [*explain.speed_rows(plan.speed), ("by", plan.speed.source)])
    elif gap_words := explain.missing_speed_advice(plan):
        say("")
        print_paragraph(gap_words, indent=4)


def _show_memory(plan: Any, detail: PlanRows) -> None:
    from gateway.planner import explain

    bar = explain.memory_bar(plan.memory, min(60, (_width() or 80) - 16))
    say(f"\n{'Memory per device' if plan.gpus else 'Memory (RAM)'}\n{bar}")
    rows = explain.memory_rows(plan.memory)
    print_table(("", "", ""), rows if detail.is_full else rows[: -explain.BUDGET_ROWS])


def _show_choices(plan: Any, why_gpus: str, origin: Any, detail: PlanRows) -> None:
    """Print the choices and the kernels of layers. origin: of the plan's starts."""
    from gateway.planner import explain, layer_tables

    say("")
    rows = explain.choices(plan, why_gpus, origin)
    visible_rows = [row[:3] for row in rows if detail.is_full or not row.is_default]
    print_table(("CHOICE", "VALUE", "WHY"), visible_rows)
    if not detail.is_full:
        if kernel_texts := layer_tables.kernel_words(plan.kernels, plan.attention):
            print_paragraph(kernel_texts)
        print_paragraph(
            f"{len(rows) - len(visible_rows)} of {len(rows)} choices are defaults."
            f" `{detail.option}` shows them, the kernel of each layer and the memory budget."
        )
        return
    if plan.kernels:
        _show_layers(
            "Kernels per rank",
            ("LAYER", "K x N", "SCHEME", "KERNEL"),
            layer_tables.kernel_table(plan.kernels),
        )
    if plan.attention:
        _show_layers(
            "Attention",
            ("LAYERS", "HEAD SIZE", "BACKEND"),
            layer_tables.attention_table(plan.attention),
        )


def _show_layers(title: str, head: tuple[str, ...], layers: Any) -> None:
    say(f"\n{title}" + (f" of {visible_line(layers.prefix)}" if layers.prefix else ""))
    print_table(head, layers.rows)
    for number, note in enumerate(layers.notes, start=1):
        print_paragraph(note, indent=4, first=f"({number}) ")
