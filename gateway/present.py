"""What the command line prints: tables and plans for people. The facts come from `core/explain.py`."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer


def said(view: Any) -> str:
    return f"{view['state']} ({view['detail']})" if view["detail"] else str(view["state"])


def table(head: tuple[str, ...], rows: Any) -> None:
    """Columns, no frame: it reads well in a terminal and in a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=any(head), pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*[Text(str(cell)) for cell in row])
    # In a pipe there is no width to respect: lines must not break.
    console = Console() if sys.stdout.isatty() else Console(width=250)
    console.print(table)


def show_decision(decision: Any, *, as_json: bool) -> None:
    from gateway.core import explain

    if as_json:
        typer.echo(decision.model_dump_json(by_alias=True, indent=2))
        return
    typer.echo(explain.headline(decision))
    if decision.plans:
        show_plan(decision.plans[0])
    if decision.rejected:
        typer.echo("\nRejected")
        table(("CANDIDATE", "VERDICT", "REASON", "SOURCE"), explain.rejections(decision.rejected))


def show_matrix(cells: Any, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([cell.model_dump() for cell in cells], indent=2))
        return
    rows = [
        (
            cell.model,
            cell.hardware,
            str(cell.engine),
            cell.state if cell.state != "failing" else cell.verdict,
            f"TP={cell.tensor_parallel}" + (f" PP={cell.pipeline_parallel}" if cell.pipeline_parallel > 1 else ""),
            "" if cell.max_model_len is None else f"{cell.max_model_len:,}",
            cell.why,
        )
        for cell in cells
    ]
    table(("MODEL", "HARDWARE", "ENGINE", "STATE", "GPUS", "CONTEXT", "WHY"), rows)


def show_plan(plan: Any) -> None:
    from gateway.core import explain

    typer.echo("")
    table(("CHOICE", "VALUE", "REASON", "SOURCE"), explain.choices(plan))
    if plan.kernels:
        typer.echo("\nKernels")
        table(("LAYER", "K x N PER RANK", "KERNEL", "PASSED OVER"), explain.kernels(plan.kernels))
    if plan.attention:
        typer.echo("\nAttention")
        table(("LAYERS", "HEAD SIZE", "BACKEND", "PASSED OVER"), explain.attention(plan.attention))
    typer.echo("\nMemory per device\n" + explain.memory_bar(plan.memory))
    table(("", "", "", ""), explain.memory_rows(plan.memory))
    for warning in plan.warnings:
        typer.echo(f"warning: {warning}")
    environment = " ".join(f"{name}={value}" for name, value in plan.env.items())
    typer.echo(f"\nEngine flags: {environment} {' '.join(plan.argv)}".rstrip())


def show_model(view: Any) -> None:
    import datetime

    from gateway.domain import Plan

    typer.echo(f"{view['name']}: {said(view)}")
    if view["plan"]:
        show_plan(Plan.model_validate(view["plan"]))
    if view["attempts"]:
        typer.echo("\nAttempts")
        for attempt in view["attempts"]:
            started = datetime.datetime.fromtimestamp(attempt["started_at"], tz=datetime.UTC).astimezone().strftime("%F %T")
            typer.echo(
                f"  {attempt['id']}  {started}  {attempt['state']}  {attempt['engine']}  context {attempt['max_model_len']:,}"
            )
            if failure := attempt["failure"]:
                typer.echo(f"     {failure['kind']} while {failure['phase']}: {failure['message']} {failure['advice']}")
                if failure["line"]:
                    typer.echo(f"     log: {failure['line']}")
