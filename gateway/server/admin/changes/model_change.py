"""A change of a model by a merge patch: its checks, its effects, and its record."""

from __future__ import annotations

from typing import Any

from fastapi.responses import Response
from pydantic import ValidationError

from gateway.controller.decisions.changes import (
    diff_plans,
    diff_wishes,
    may_need_restart,
    no_effect_reason,
    starts_same_engine,
)
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.domain import Wish
from gateway.domain.plan_request import PlanResult
from gateway.domain.value import first_problem
from gateway.domain.wish import WishOrigin
from gateway.errors import (
    BadFlag,
    BadModel,
    BadRequest,
    HostError,
    NeedsRemoteCode,
    NoPlan,
    NotFound,
)
from gateway.server.admin.model_views import ChangeAnswer
from gateway.server.gateway_parts import Gateway
from gateway.wishes.model_request import ModelRequest
from gateway.wishes.shown_wish import drop_hidden_values

# Errors of planning a model.
PLAN_ERRORS = (BadRequest, BadModel, NeedsRemoteCode, BadFlag, NotFound, NoPlan, HostError)


async def change_wish(
    gateway: Gateway,
    model: ManagedModel,
    patch: dict[str, Any],
    origin: WishOrigin,
    *,
    dry_run: bool,
) -> Response:
    """The answer to a change by a JSON merge patch, with its effects. Raises PLAN_ERRORS,
    Conflict, StoreError."""
    loop = gateway.loop
    old_wish = model.wish
    wish = await loop.plan_preview.resolve(_patched_wish(old_wish, patch))
    result = None
    if may_need_restart(old_wish, wish) and wish.source is not None:
        result = await loop.plan_preview.plan_change(model, wish)
        _check_change(old_wish.name, result, sets_commits="commits" in patch, dry_run=dry_run)
        wish = wish.evolve(commits=dict(result.commits))
    answer = _change_answer(model, wish, result)
    if not dry_run:
        await loop.owner_commands.change(
            model, old_wish, wish, restarts=answer.restarts_engines, origin=origin
        )
    text = answer.model_dump_json(exclude={"decision"}).encode()
    decision = result.decision if dry_run and result is not None else b"null"
    return Response(
        b'%b,"decision":%b}' % (text.removesuffix(b"}"), decision),
        202 if answer.restarts_engines and not dry_run else 200,
        media_type="application/json",
    )


def _check_change(name: str, result: PlanResult, *, sets_commits: bool, dry_run: bool) -> None:
    """Refuse a change whose commits the Hub did not confirm, or that leaves a model without a
    plan. Raises BadModel, NoPlan."""
    if result.unconfirmed_repos and sets_commits:
        raise BadModel(
            f"The Hub did not answer for {', '.join(result.unconfirmed_repos)};"
            f" {name} is not changed.",
            hint="Try again when the Hub is reachable.",
        )
    if result.plan is None and not result.questions and not dry_run:
        raise NoPlan(
            f"Nothing was changed: {result.reason.rstrip('.')}.",
            hint=f"`fitserve plan` has details; {name} keeps running unchanged.",
        )


def _change_answer(model: ManagedModel, wish: Wish, result: PlanResult | None) -> ChangeAnswer:
    """The effects of a new wish.

    result: its plan; None for a change that concerns no engine.
    """
    running_plans = [attempt.plan for attempt in model.serving]
    plan = result.plan if result is not None else None
    changed_fields = diff_wishes(model.wish, wish)
    answer = ChangeAnswer(
        name=model.wish.name,
        restarts_engines=result is not None
        and (
            not running_plans
            or plan is None
            or not all(starts_same_engine(plan, running_plan) for running_plan in running_plans)
        ),
        wish=changed_fields,
        commits=wish.commits,
        reason=result.reason if result is not None and plan is None else "",
    )
    if plan is None or not running_plans:
        return answer
    return answer.evolve(
        plan=diff_plans(running_plans[0], plan),
        no_effect=no_effect_reason(changed_fields, running_plans[0], plan),
    )


def _patched_wish(wish: Wish, patch: dict[str, Any]) -> Wish:
    """The wish after a JSON merge patch. Raises BadRequest."""
    if patch.get("name", wish.name) != wish.name:
        raise BadRequest(
            "The name of a model cannot be changed.",
            hint="Add the model under the other name, then remove this one.",
            param="name",
        )
    fields = _merge(wish.model_dump(mode="json"), drop_hidden_values(wish, patch))
    try:
        changed_wish = ModelRequest.model_validate(fields).wish()
    except ValidationError as error:
        problem = first_problem(error, ModelRequest.model_fields)
        raise BadRequest(f"{problem}.", hint="Nothing was changed.") from None
    if bool(changed_wish.source) != bool(wish.source):
        raise BadRequest(
            "A model cannot become an endpoint, nor an endpoint a model.",
            hint="Remove it, then add the other.",
            param="source",
        )
    return changed_wish


def _merge(old_value: Any, patch: Any) -> Any:
    """`old_value` after the merge patch, by RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    merged_value = dict(old_value) if isinstance(old_value, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged_value.pop(name, None)
        else:
            merged_value[name] = _merge(merged_value.get(name), value)
    return merged_value
