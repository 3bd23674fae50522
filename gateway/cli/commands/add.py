"""`fitserve add`: a new model for the running gateway."""

from __future__ import annotations

import math
import uuid
from typing import Annotated, Any

import typer

from gateway.cli.client import call
from gateway.cli.commands.model import print_view, wait_until_ready
from gateway.cli.options import (
    Copies,
    EndpointOptions,
    Json,
    KeepAlive,
    Priority,
    WishOptions,
    absolute_source,
    drop_none,
    expand_options,
    serving_fields,
    timeout_seconds,
)
from gateway.cli.present import CHECK_OMISSION, PlanRows, show_decision
from gateway.cli.text_tables import print_paragraph
from gateway.domain.record import FrozenRecord

# The wait for an endpoint is short, because no model has to load.
_ENDPOINT_TIMEOUT_S = 60.0


class ServingOptions(FrozenRecord, frozen=True):
    """How the model is served: replicas and policy."""

    replicas: Annotated[
        int | None, typer.Option(min=1, help="Number of replicas; default: as the plan advises.")
    ] = None
    copies: Copies = None
    allow_remote_code: Annotated[
        bool, typer.Option("--allow-remote-code", help="Let the engine run the repository's code.")
    ] = False
    keep_alive: KeepAlive = None
    pinned: Annotated[
        bool,
        typer.Option("--pinned", help="Never unload the model, idle or not."),
    ] = False
    priority: Priority = None
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Ask the engine's own code before the start."),
    ] = True

    def fields(self) -> dict[str, Any]:
        """The fields of the request, without those that were not given."""
        return serving_fields(
            replicas=self.replicas,
            copies=self.copies,
            check=None if self.check else False,
            allow_remote_code=self.allow_remote_code or None,
            keep_alive=self.keep_alive,
            pinned=self.pinned or None,
            priority=self.priority,
        )


class RunOptions(FrozenRecord, frozen=True):
    """Whether the model is added, and how long the command waits for it."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; add nothing.")] = False
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Return when the model is ready (exit 0) or cannot be (exit 3)."
        ),
    ] = False
    timeout: Annotated[
        str | None,
        typer.Option(
            help=("Time limit of --wait: 10m, 90 (seconds). Default: none, and 1m for an endpoint.")
        ),
    ] = None


@expand_options
def add(
    name: Annotated[str, typer.Argument(help="Name that clients put in `model`.")],
    endpoints: EndpointOptions,
    wish: WishOptions,
    options: ServingOptions,
    run: RunOptions,
    source: Annotated[
        str | None, typer.Argument(help="Model folder or Hugging Face repository.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Add a model to the running gateway."""
    limit_s = math.inf
    if run.timeout:
        limit_s = timeout_seconds(run.timeout)
    elif endpoints.endpoint:
        limit_s = _ENDPOINT_TIMEOUT_S
    body: dict[str, Any] = {
        "name": name,
        "endpoints": endpoints.endpoint or [],
        **wish.fields(),
        **drop_none({"source": absolute_source(source), "endpoint_key": endpoints.endpoint_key}),
        **options.fields(),
    }
    if run.dry_run:
        _show_plan(body, as_json=as_json)
        return
    view = call("POST", "/admin/models", body, idempotency_key=uuid.uuid4().hex)
    if run.wait:
        view = wait_until_ready(name, limit_s, is_quiet=as_json)
    print_view(view, as_json=as_json)
    for stage in () if as_json else (view.get("plan") or {}).get("unrehearsed", ()):
        print_paragraph(f"{CHECK_OMISSION}: {stage}")


def _show_plan(body: dict[str, Any], *, as_json: bool) -> None:
    from gateway.domain import Decision

    decision = Decision.model_validate(call("POST", "/admin/models?dry_run=true", body))
    detail = PlanRows(is_full=False, option="fitserve plan --all")
    show_decision(decision, as_json=as_json, detail=detail)
    if not decision.plans:
        raise typer.Exit(3)
