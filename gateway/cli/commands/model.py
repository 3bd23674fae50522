"""Commands on one model of the gateway: show, logs, retry, stop, unload, start and rm."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from gateway.cli.client import call, model_path, stream
from gateway.cli.disk_output import removal_text
from gateway.cli.model_output import UNKNOWN_TIME, show_model, start_text, status_text
from gateway.cli.options import AllRows, Json, ModelName, drop_none
from gateway.cli.present import FULL_DETAIL, SHORT_DETAIL
from gateway.cli.terminal import print_bytes, print_message, say
from gateway.cli.text_tables import print_paragraph
from gateway.visible import visible_line

# Seconds between two lines about one phase of a start.
_REPEAT_S = 15.0
_FINAL_STATES = ("no_plan", "quarantined", "stopped", "stopping")


def show(name: ModelName, shows_all: AllRows = False, as_json: Json = False) -> None:
    """Show a model's state, plan and attempts, with reasons. Exit code 3 unless it is ready."""
    view = call("GET", model_path(name))
    if as_json:
        say(json.dumps(view, indent=2))
    else:
        has_gpus = view["plan"] or view["wish"]["gpus"]
        gpus = call("GET", "/admin/hardware")["gpus"] if has_gpus else []
        show_model(
            view,
            {gpu["uuid"]: gpu["index"] for gpu in gpus},
            FULL_DETAIL if shows_all else SHORT_DETAIL,
        )
    if view["state"] != "ready":
        raise typer.Exit(3)


def logs(
    name: ModelName,
    attempt: Annotated[
        int | None, typer.Option(help="Number of an attempt; default: the latest.")
    ] = None,
    tail: Annotated[int | None, typer.Option(min=1, help="Print only the last lines.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the engine ends.")
    ] = False,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Print the engine's bytes unchanged, escape sequences too."),
    ] = False,
) -> None:
    """Print the log of a model's engine. Terminal control characters are shown as \\x1b."""
    query = drop_none({"attempt": attempt, "tail": tail, "follow": "true" if follow else None})
    print_bytes(stream(model_path(name, "/logs"), query), is_raw=raw)


def retry(name: ModelName, as_json: Json = False) -> None:
    """Start a model again now. The model was given up, or waits for its next start. Image tags are
    resolved again."""
    print_view(call("POST", model_path(name, "/retry")), as_json=as_json)


def stop(name: ModelName, as_json: Json = False) -> None:
    """Stop a model after its running requests, and keep it. Only `fitserve start` loads it
    again."""
    print_view(call("POST", model_path(name, "/stop")), as_json=as_json)


def unload(name: ModelName, as_json: Json = False) -> None:
    """Unload a model after its running requests. The next request loads it again."""
    print_view(call("POST", model_path(name, "/unload")), as_json=as_json)


def start(name: ModelName, as_json: Json = False) -> None:
    """Load a stopped model again."""
    print_view(call("POST", model_path(name, "/start")), as_json=as_json)


def rm(
    name: ModelName,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when all its engines have stopped.")
    ] = False,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights",
            help="Delete its weights from the disk too, except those that other models need.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Stop a model's engines and remove the model."""
    import time

    if weights:
        answer = call("DELETE", model_path(name, "?weights=true"), timeout_s=None)
        _print_value(answer, removal_text(answer), as_json=as_json)
        return
    answer = call("DELETE", model_path(name))
    while wait and any(model["name"] == name for model in call("GET", "/admin/models")["data"]):
        time.sleep(0.2)
    _print_value(answer, f"{name}: {'removed' if wait else 'stopping'}", as_json=as_json)


class WaitReports:
    """The lines of a wait: one for each new state and phase, and from time to time in a phase.

    Only the first line of a start says that its time is unknown.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage: tuple[str, str | None] | None = None
        self._line = ""
        self._at_s = 0.0
        self._has_unknown_time = False

    def line(self, view: Any, now_s: float) -> str:
        """The line that is due; "": none. No line comes twice in a row."""
        start = next(
            (replica["start"] for replica in view["replicas"] if replica.get("start")), None
        )
        status, phase_text = status_text(view), start_text(start) if start is not None else ""
        stage = status, start["phase"] if start is not None else None
        if self._has_unknown_time:
            phase_text = phase_text.removesuffix(UNKNOWN_TIME).removesuffix(", ")
        # "verifying" is also the first word of its phase.
        texts = (phase_text,) if phase_text.startswith(status) else (status, phase_text)
        line = f"{self._name}: {'; '.join(filter(None, texts))}"
        is_due = stage != self._stage or now_s - self._at_s >= _REPEAT_S
        if line == self._line or not is_due:
            return ""
        self._stage = stage
        self._line = line
        self._at_s = now_s
        self._has_unknown_time = self._has_unknown_time or UNKNOWN_TIME in phase_text
        return line


def wait_until_ready(name: str, limit_s: float, *, is_quiet: bool) -> Any:
    """The view of the model once a request can reach it. Exits with code 3 when the gateway has
    given up, or after `limit_s`."""
    import time

    reports = WaitReports(name)
    deadline = time.monotonic() + limit_s
    while True:
        view = call("GET", model_path(name))
        # A request loads such a model.
        on_request = view["state"] == "stopped" and view["on_request"]
        if view["state"] in ("ready", "asleep") or on_request:
            return view
        if view["state"] in _FINAL_STATES:
            print_message(f"fitserve: {name} cannot be served: {visible_line(view['detail'])}")
            raise typer.Exit(3)
        if not is_quiet and (line := reports.line(view, time.monotonic())):
            print_message(line)
        if time.monotonic() > deadline:
            print_message(
                f"fitserve: {name} is not ready yet; the gateway goes on starting it."
                f" `fitserve show {name}` shows its state."
            )
            raise typer.Exit(3)
        time.sleep(0.5)


def print_view(view: Any, *, as_json: bool) -> None:
    """Print the state of a model, or its whole view as JSON."""
    _print_value(view, f"{view['name']}: {status_text(view)}", as_json=as_json)


def _print_value(value: Any, text: str, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(value, indent=2))
    else:
        print_paragraph(text)
