"""`fitserve ps`, `list` and `df`: the engines, sources and disk usage of the gateway's models."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from gateway.cli.client import call
from gateway.cli.disk_output import show_disk
from gateway.cli.model_output import detail_text, keep_alive_text
from gateway.cli.options import Json
from gateway.cli.terminal import say
from gateway.cli.text_tables import drop_column, print_table
from gateway.domain.units import duration_text, format_bytes

Requests = Annotated[
    bool, typer.Option("--requests", help="List the running requests instead, oldest first.")
]

_NO_MODELS = (
    "There are no models. `fitserve add NAME SOURCE` adds one, and `fitserve plan SOURCE` shows its"
    " plan first."
)


def ps(as_json: Json = False, requests: Requests = False) -> None:
    """List the models with engine, context, GPUs and memory. UP and LAST USE are the times since
    the start and the last request. Prepared processes fork the next engines."""
    if requests:
        _show_requests(as_json)
        return
    listing = call("GET", "/admin/models")
    if as_json:
        say(json.dumps(listing, indent=2))
        return
    numbers = _numbers(listing["data"])
    full_head = (
        "NAME",
        "STATE",
        "ENGINE",
        "CONTEXT",
        "GPUS",
        "MEMORY",
        "UP",
        "LAST USE",
        "STAYS",
        "DETAIL",
    )
    now_s = time.time()
    full_rows = [_model_row(view, numbers, now_s) for view in listing["data"]]
    head, rows = drop_column(full_head, full_rows, "GPUS", ("CPU", "-"))
    # The state and the reason count more than times, which `fitserve show` has too.
    names = ("UP", "LAST USE", "STAYS", "CONTEXT", "MEMORY", "GPUS")
    optional = [name for name in names if name in head]
    print_table(head, rows, empty=_NO_MODELS, optional=optional)
    if recorded := _recorded_owners(call("GET", "/admin/transcripts/state")):
        say(f"\nRecorded: {', '.join(recorded)}. `fitserve transcripts ls` lists the requests.")
    if prepared_engines := call("GET", "/admin/prepared")["data"]:
        say("")
        print_table(
            ("PREPARED", "PID", "MEMORY", "UP"),
            [_prepared_row(prepared_engine, now_s) for prepared_engine in prepared_engines],
        )


def _recorded_owners(state: Any) -> list[str]:
    """The models and keys whose requests are recorded, in words."""
    if not state["is_on"]:
        return []
    models = ["every model" if name == "*" else f"model {name}" for name in state["models"]]
    return models + [f"key {name}" for name in state["keys"]]


def df(as_json: Json = False) -> None:
    """Show the disk usage of models and engines. Data that no model needs is marked."""
    usage = call("GET", "/admin/disk", timeout_s=None)
    if as_json:
        say(json.dumps(usage, indent=2))
    else:
        show_disk(usage)


def list_models(as_json: Json = False) -> None:
    """List the models with source, commit and disk usage."""
    listing = call("GET", "/admin/models")["data"]
    on_disk = {row["name"]: row for row in call("GET", "/admin/disk/models")["data"]}
    rows = [_model_entry(view, on_disk.get(view["name"], {"revisions": []})) for view in listing]
    if as_json:
        say(json.dumps({"data": rows}, indent=2))
        return
    now_s = time.time()
    print_table(
        ("NAME", "STATE", "SIZE", "COMMIT", "LAST USE", "SOURCE"),
        [
            (
                row["name"],
                row["state"],
                format_bytes(row["bytes"]) if row["bytes"] else "-",
                ", ".join(commit[:12] for commit in row["commits"]) or "-",
                _age_text(row["used_at"], now_s),
                row["source"],
            )
            for row in rows
        ],
        empty=_NO_MODELS,
        optional=("LAST USE", "COMMIT"),
    )


def _show_requests(as_json: bool) -> None:
    """Print running and waiting requests."""
    listing = call("GET", "/admin/requests")
    if as_json:
        say(json.dumps(listing, indent=2))
        return
    now_s = time.time()
    head = ("MODEL", "STATE", "AGE", "SENT", "ENDPOINT", "KEY", "CLIENT", "ID")
    print_table(
        head,
        [
            (
                request["model"],
                request["phase"],
                duration_text(max(0.0, now_s - request["began_at"])),
                format_bytes(request["sent_bytes"]),
                request["endpoint"],
                request["key"] or "-",
                request["address"] or "-",
                request["id"],
            )
            for request in listing["data"]
        ],
        empty="No request is running.",
        optional=("CLIENT", "KEY", "SENT"),
    )
    if listing["more"]:
        say(f"{listing['more']:,} more requests are running.")
    if listing["waiting"]:
        say("")
        print_table(
            ("MODEL", "CLASS", "WAITING", "OLDEST"),
            [
                (
                    row["model"],
                    row["priority_class"],
                    f"{row['requests']:,}",
                    duration_text(max(0.0, now_s - row["oldest_at"])),
                )
                for row in listing["waiting"]
            ],
            empty="",
        )


def _model_entry(view: Any, on_disk: Any) -> dict[str, Any]:
    wish = view["wish"]
    revisions = on_disk["revisions"]
    folder_bytes = on_disk.get("folder_bytes") or 0
    return {
        "name": view["name"],
        "aliases": wish["aliases"],
        "state": view["state"],
        "source": wish["source"] or ", ".join(wish["endpoints"]),
        "commits": [revision["commit"] for revision in revisions],
        "bytes": sum((revision["bytes"] for revision in revisions), folder_bytes),
        "used_at": view["used_at"],
    }


def _model_row(view: Any, numbers: dict[str, int], now_s: float) -> tuple[object, ...]:
    """The row of a model in the table of `fitserve ps`."""
    planned_replicas = [replica for replica in view["replicas"] if replica["engine"]]
    ready_replicas = [replica for replica in planned_replicas if replica["state"] == "ready"]
    replicas = ready_replicas or planned_replicas
    gpus = [numbers.get(uuid) for replica in replicas for uuid in replica["gpus"]]
    # A lost GPU has no number.
    gpu_numbers = ",".join(
        "?" if number is None else str(number) for number in sorted(gpus, key=str)
    )
    ready_at = min(
        (replica["ready_at"] for replica in ready_replicas if replica["ready_at"]), default=None
    )
    engines = dict.fromkeys(replica["engine"] for replica in replicas)
    contexts = {replica["max_model_len"] for replica in replicas}
    memory_bytes = max((replica["memory_bytes"] for replica in replicas), default=None)
    return (
        view["name"],
        _state(view, len(ready_replicas)),
        ", ".join(engines) or "-",
        f"{min(contexts):,}" if contexts else "-",
        gpu_numbers or ("CPU" if replicas else "-"),
        format_bytes(memory_bytes) if memory_bytes else "-",
        duration_text(now_s - ready_at) if ready_at else "-",
        _age_text(view["used_at"], now_s),
        _stay_text(view, ready_at, now_s),
        _state_detail(view),
    )


def _stay_text(view: Any, ready_at: float | None, now_s: float) -> str:
    """The time until a loaded model is unloaded without a request, or its keep_alive while it is
    out."""
    keep_alive_s = view["keep_alive"]
    if ready_at is None or view["wish"]["policy"]["pinned"] or not keep_alive_s or keep_alive_s < 0:
        return keep_alive_text(view, now_s).partition(",")[0] or "-"
    used_at = max(ready_at, view["used_at"] or view["created_at"])
    return duration_text(max(0.0, keep_alive_s - max(0.0, now_s - used_at)))


def _prepared_row(view: Any, now_s: float) -> tuple[object, ...]:
    memory = format_bytes(view["pss_bytes"]) if view["pss_bytes"] is not None else "-"
    return view["engine"], view["pid"], memory, duration_text(max(0.0, now_s - view["since"]))


def _state(view: Any, ready_count: int) -> str:
    """The state, with the number of serving replicas where several are wanted."""
    if copies := view.get("copies"):
        return f"{view['state']} {ready_count} of {copies['least_count']}-{copies['most_count']}"
    replicas = len(view["replicas"])
    return f"{view['state']} {ready_count}/{replicas}" if replicas > 1 else str(view["state"])


def _age_text(time_s: float | None, now_s: float) -> str:
    return f"{duration_text(max(0.0, now_s - time_s))} ago" if time_s else "-"


def _numbers(views: list[Any]) -> dict[str, int]:
    """The numbers of GPUs in nvidia-smi by UUID; empty where no engine uses a GPU."""
    if not any(replica["gpus"] for view in views for replica in view["replicas"]):
        return {}
    return {gpu["uuid"]: gpu["index"] for gpu in call("GET", "/admin/hardware")["gpus"]}


def _state_detail(view: Any) -> str:
    change_text = ""
    if change := view["change"]:
        is_refused = change["state"] == "refused"
        prefix = "the last change failed" if is_refused else "change in progress"
        change_text = f"{prefix}: {change['detail']}"
    return "; ".join(filter(None, (detail_text(view), change_text))) or _rival_hint(view)


def _rival_hint(view: Any) -> str:
    rival = view["rival"]
    return (
        f"another plan should be {rival['gain']:.2f} times as good: fitserve show {view['name']}"
        if rival
        else ""
    )
