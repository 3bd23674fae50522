"""`fitserve ps` and `fitserve list`: the models of the running gateway, by what runs of them and by
what they are made of."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from gateway.cli.client import call
from gateway.cli.options import Json
from gateway.cli.present import detail_text, residence_text, table
from gateway.cli.terminal import say
from gateway.domain.units import in_words
from gateway.domain.units import words as size

Requests = Annotated[
    bool, typer.Option("--requests", help="List the requests in flight instead, oldest first.")
]


def ps(as_json: Json = False, requests: Requests = False) -> None:
    """List the models of the running gateway: engine, context, GPUs, memory of each GPU, how long
    it serves, when it was last asked."""
    if requests:
        _requests(as_json)
        return
    listing = call("GET", "/admin/models")
    if as_json:
        say(json.dumps(listing, indent=2))
        return
    numbers = _numbers(listing["data"])
    head = (
        "NAME",
        "STATE",
        "ENGINE",
        "CONTEXT",
        "GPUS",
        "MEMORY",
        "UP",
        "ASKED",
        "STAYS",
        "DETAIL",
    )
    table(head, [_row(view, numbers, time.time()) for view in listing["data"]])


def list_models(as_json: Json = False) -> None:
    """List the models with where they come from, their commit, and what their weights take on the
    disk."""
    listing = call("GET", "/admin/models")["data"]
    on_disk: dict[str, list[Any]] = {}
    for revision in call("GET", "/admin/disk", timeout_s=None)["revisions"]:
        for name in revision["models"]:
            on_disk.setdefault(name, []).append(revision)
    rows = [_entry(view, on_disk.get(view["name"], [])) for view in listing]
    if as_json:
        say(json.dumps({"data": rows}, indent=2))
        return
    now = time.time()
    table(
        ("NAME", "STATE", "SIZE", "COMMIT", "ASKED", "SOURCE"),
        [
            (
                *(one["name"], one["state"], size(one["bytes"]) if one["bytes"] else "-"),
                *(
                    ", ".join(commit[:12] for commit in one["commits"]) or "-",
                    _ago(one["used_at"], now),
                    one["source"],
                ),
            )
            for one in rows
        ],
    )


def _requests(as_json: bool) -> None:
    found = call("GET", "/admin/requests")
    if as_json:
        say(json.dumps(found, indent=2))
        return
    now = time.time()
    head = ("MODEL", "STATE", "AGE", "SENT", "ENDPOINT", "KEY", "CLIENT", "ID")
    table(
        head,
        [
            (
                *(
                    one["model"],
                    one["phase"],
                    in_words(max(0.0, now - one["began_at"])),
                    size(one["sent_bytes"]),
                ),
                *(one["endpoint"], one["key"] or "-", one["address"] or "-", one["id"]),
            )
            for one in found["data"]
        ],
    )
    if found["more"]:
        say(f"{found['more']:,} more are in flight.")


def _entry(view: Any, revisions: list[Any]) -> dict[str, Any]:
    wish = view["wish"]
    return {
        "name": view["name"],
        "aliases": wish["aliases"],
        "state": view["state"],
        "source": wish["source"] or ", ".join(wish["endpoints"]),
        "commits": [one["commit"] for one in revisions],
        "bytes": sum(one["bytes"] for one in revisions),
        "used_at": view["used_at"],
    }


def _row(view: Any, numbers: dict[str, int], now: float) -> tuple[object, ...]:
    planned = [one for one in view["replicas"] if one["engine"]]
    serving = [one for one in planned if one["state"] == "ready"]
    shown = serving or planned
    gpus = [numbers.get(uuid) for one in shown for uuid in one["gpus"]]
    since = min((one["ready_at"] for one in serving if one["ready_at"]), default=None)
    engines = dict.fromkeys(one["engine"] for one in shown)
    contexts = {one["max_model_len"] for one in shown}
    most = max((one["memory_bytes"] for one in shown), default=None)
    return (
        *(view["name"], _state(view, len(serving)), ", ".join(engines) or "-"),
        f"{min(contexts):,}" if contexts else "-",
        # A GPU that is lost has no number.
        ",".join("?" if one is None else str(one) for one in sorted(gpus, key=str))
        or ("cpu" if shown else "-"),
        *(
            size(most) if most else "-",
            in_words(now - since) if since else "-",
            _ago(view["used_at"], now),
        ),
        *(residence_text(view, now).partition(",")[0] or "-", _detail(view)),
    )


def _state(view: Any, serving: int) -> str:
    """With how many replicas serve, where more than one is wanted."""
    wanted = len(view["replicas"])
    return f"{view['state']} {serving}/{wanted}" if wanted > 1 else str(view["state"])


def _ago(at: float | None, now: float) -> str:
    return f"{in_words(max(0.0, now - at))} ago" if at else "-"


def _numbers(views: list[Any]) -> dict[str, int]:
    """The numbers of GPUs by UUID, as nvidia-smi has them; asked only where an engine has any."""
    if not any(replica["gpus"] for view in views for replica in view["replicas"]):
        return {}
    return {gpu["uuid"]: gpu["index"] for gpu in call("GET", "/admin/hardware")["gpus"]}


def _detail(view: Any) -> str:
    change = view["change"]
    said = (
        f"the last change was given up: {change['detail']}"
        if change and change["state"] == "refused"
        else ""
    )
    if change and not said:
        said = f"being changed: {change['detail']}"
    return "; ".join(filter(None, (detail_text(view), said))) or _rival_hint(view)


def _rival_hint(view: Any) -> str:
    rival = view["rival"]
    return (
        f"another plan should be {rival['gain']:.2f} times as good: fitserve show {view['name']}"
        if rival
        else ""
    )
