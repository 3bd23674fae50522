"""`fitserve tune`: a faster plan of a served model, found by trials on its machine."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from gateway.cli.client import call, model_path
from gateway.cli.options import Json, ModelName
from gateway.cli.terminal import say, status
from gateway.cli.text_tables import print_paragraph, print_table
from gateway.errors import FitserveError

_POLL_S = 0.5


def tune(
    name: ModelName,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=1440, help="Longest time of the search.")
    ] = 15,
    offline: Annotated[
        bool, typer.Option("--offline", help="Stop the model meanwhile, where memory is short.")
    ] = False,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Also try a KV cache of less precision.")
    ] = False,
    take: Annotated[
        bool, typer.Option("--apply", help="Take the best plan without asking.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Search for a faster plan of a served model.

    Plans that an expert would try are started and measured, alongside the model where memory
    allows. Nothing changes without --apply or your consent. Ctrl-C ends the search.
    """
    body = {"minutes": minutes, "offline": offline, "lossy": lossy}
    path = model_path(name, "/tune")
    report = _start_search(path, body)
    try:
        report = _watch(path, report, is_quiet=as_json)
    except KeyboardInterrupt:
        call("DELETE", path)
        raise
    if not as_json:
        _show_report(report)
    if report["wish"] is not None and report["state"] == "done":
        report = _settle(
            name, report, takes_best=take, asks_user=not as_json and sys.stdin.isatty()
        )
    if as_json:
        say(json.dumps(report, indent=2))
    if report["state"] != "done":
        raise typer.Exit(1)


def _start_search(path: str, body: dict[str, Any]) -> Any:
    """The report of the new search. Asks where the model has to stop for it."""
    try:
        return call("POST", path, body)
    except FitserveError as error:
        if error.param != "offline" or not sys.stdin.isatty():
            raise
        print_paragraph(error.message)
        if not typer.confirm("Stop the model while its plans are measured?"):
            raise typer.Exit(1) from None
        return call("POST", path, {**body, "offline": True})


def _watch(path: str, report: Any, *, is_quiet: bool) -> Any:
    """The report of the ended search; each measured plan is shown when it is."""
    shown_count = 0
    with status() as show_step:
        while report["state"] == "running":
            if not is_quiet:
                for plan in report["tried"][shown_count:]:
                    say(_line(plan), is_error=True)
                shown_count = len(report["tried"])
                best_change = report["tried"][report["best"]]["change"] if shown_count else "-"
                left_s = max(0.0, report["seconds"] - report["elapsed_s"])
                time_note = f"; at most {left_s:.0f} s more" if sys.stderr.isatty() else ""
                show_step(f"{report['phase']}; best: {best_change}{time_note}")
            time.sleep(_POLL_S)
            report = call("GET", path)
    return report


def _line(plan: Any) -> str:
    """The figures of one plan."""
    if plan["speed"] is None:
        return f"{plan['change']}: {plan['problem']}"
    speed = plan["speed"]
    return (
        f"{plan['change']}: {speed['stream']['value']:,g} tokens/s alone, "
        f"{speed['total']['value']:,g} with {speed['concurrency']} concurrent ({plan['worth']:.2f})"
    )


def _show_report(report: Any) -> None:
    rows = []
    for index, plan in enumerate(report["tried"]):
        speed = plan["speed"]
        mark = "best" if index == report["best"] and index else ""
        if speed is None:
            rows.append((plan["change"], "-", "-", "-", "-", plan["problem"]))
        else:
            rows.append(
                (
                    plan["change"],
                    f"{speed['stream']['value']:,g}",
                    f"{speed['total']['value']:,g}",
                    f"{speed['first_token_2k_s']['value']:,g} s",
                    f"{plan['worth']:.2f}",
                    mark,
                )
            )
    print_table(("PLAN", "ALONE", "CONCURRENT", "FIRST TOKEN", "SCORE", ""), rows)
    result_words = (
        "The search ended" if report["state"] == "done" else f"The search {report['state']}"
    )
    print_paragraph(f"{result_words} after {report['elapsed_s']:.0f} s: {report['phase']}.")


def _settle(name: str, report: Any, *, takes_best: bool, asks_user: bool) -> Any:
    """The report after the owner's decision about the best plan."""
    best_trial = report["tried"][report["best"]]
    text = f"{best_trial['change']} is worth {best_trial['worth']:.2f} times the served plan."
    if asks_user and not takes_best:
        print_paragraph(text)
        takes_best = typer.confirm(f"Change {name} to it?")
    if takes_best:
        report = call("POST", model_path(name, "/tune/apply"))
        text = f"{name} changes to the best plan; `fitserve show {name}` shows its progress."
    elif not asks_user:
        text += f" It is not taken: `fitserve set {name} {_options(name, report['wish'])}`"
    if asks_user or takes_best or not report["applied"]:
        say(text, is_error=True)
    return report


def _options(name: str, wish: Any) -> str:
    """The options of `fitserve set` that give the model this wish."""
    now = call("GET", model_path(name))["wish"]
    options = []
    names = {"engines": "engine", "tensor_parallel": "tp"}
    for field in ("engines", "tensor_parallel", "replicas", "speculative"):
        value = wish[field][0] if field == "engines" else wish[field]
        if wish[field] != now[field] and value is not None:
            options.append(f"--{names.get(field, field)} {value}")
    if wish.get("data_parallel"):
        options.append(f"--arg data-parallel-size={wish['data_parallel']}")
    changed_flags = {
        flag: value for flag, value in wish["args"].items() if now["args"].get(flag) != value
    }
    options += [
        f"--arg {flag}={json.dumps(value).strip(chr(34))}" for flag, value in changed_flags.items()
    ]
    return " ".join(options)
