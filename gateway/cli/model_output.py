"""The state of a model for people: its start, plan and attempts."""

from __future__ import annotations

from typing import Any

from gateway.cli.present import SHORT_DETAIL, PlanRows, show_plan
from gateway.cli.terminal import say
from gateway.cli.text_tables import print_paragraph, print_table, show_changes
from gateway.domain.phases import detail_without_state, phase_label
from gateway.domain.units import duration_text, sentence
from gateway.visible import visible_line


def status_text(view: Any) -> str:
    """The state of a model, with its reason in parentheses."""
    # The detail may begin with the state itself.
    detail = detail_without_state(view["state"], visible_line(_own_detail(view)))
    return f"{view['state']} ({detail})" if detail else str(view["state"])


def _own_detail(view: Any) -> str:
    """The detail of a model; "": it is the state, or the phase of a start, which `start_text` says
    with its seconds."""
    starts = [replica["start"] for replica in view.get("replicas", ()) if replica.get("start")]
    phases = [phase_label(start["phase"]) for start in starts if start["phase"] is not None]
    detail = str(view["detail"] or "")
    return "" if detail in (view.get("state"), *phases[:1]) else detail


def next_attempt_text(next_attempt: Any) -> str:
    """The attempt after a failure, and how its plan differs."""
    choices = {change["field"] for change in next_attempt["differs"]}
    # A flag that repeats a choice is left out.
    changes = [
        change
        for change in next_attempt["differs"]
        if change["field"].removeprefix("--").replace("-", " ") not in choices - {change["field"]}
    ]
    texts = [
        f"{change['field']} {change['former'] or 'unset'} -> {change['present'] or 'unset'}"
        for change in changes
    ]
    return f"attempt {next_attempt['attempt']}, {'; '.join(texts) or 'the same plan again'}"


def detail_text(view: Any) -> str:
    """The detail column of a model: the reason of its state, and the attempt after a failure."""
    retries = [
        replica["follows"]
        for replica in view["replicas"]
        if replica["follows"] and replica["busy_with"]
    ]
    texts = [_own_detail(view)]
    texts += [
        f"after {next_attempt['failure']}: {next_attempt_text(next_attempt)}"
        for next_attempt in retries[:1]
    ]
    texts += [
        start_text(copy_view["start"]) for copy_view in view["replicas"] if copy_view.get("start")
    ][:1]
    return "; ".join(filter(None, texts))


UNKNOWN_TIME = "a first start, so its time is unknown"


def start_text(start: Any) -> str:
    """The phase of a start, with elapsed and expected seconds; "": nothing is known yet."""
    phase = start["phase"]
    expected_start = start["expected"]
    texts = []
    if phase is not None:
        usual_s = expected_start["phases"].get(phase) if expected_start is not None else None
        usual_words = f" of {duration_text(usual_s)}" if usual_s else ""
        texts.append(f"{phase_label(phase)} {duration_text(start['elapsed_s'])}{usual_words}")
    if expected_start is not None:
        passed_words = (
            f"{duration_text(start['total_s'])} of " if phase is not None else "the start takes "
        )
        low, high = (duration_text(expected_start[name]) for name in ("low_s", "high_s"))
        texts.append(f"{passed_words}{low if low == high else f'{low} to {high}'} in all")
        texts += _GRADES.get(expected_start["grade"], ())
    if start["conditions"]["is_cache_empty"]:
        texts.append(
            UNKNOWN_TIME
            if expected_start is None
            else "slower than later ones, as nothing is compiled yet"
        )
    return ", ".join(texts)


_GRADES = {
    "estimate": ("an estimate",),
    "elsewhere": ("measured on another machine", "without reading weights"),
}


def expected_start_text(start: Any) -> str:
    """The expected duration of a start that has not begun. start: of a decision."""
    expectation = {"phase": None, "expected": start["time"], "conditions": start["conditions"]}
    if start["time"] is None:
        return "No start like it was measured here, so its time is unknown."
    return sentence(start_text(expectation))


_ABILITIES = {
    "tools": "tool calls",
    "required_tools": "required tool calls",
    "reasoning": "thoughts apart",
    "json_schema": "answers by a schema",
}


def _gpu_numbers_text(uuids: list[str], numbers: dict[str, int]) -> str:
    return ", ".join(f"GPU {numbers[uuid]} ({uuid})" if uuid in numbers else uuid for uuid in uuids)


def keep_alive_text(view: Any, now_s: float) -> str:
    """How long the model stays loaded without a request."""
    from gateway.domain.units import duration_text

    policy = view["wish"]["policy"]
    keep_alive_s = view["keep_alive"]
    if keep_alive_s is None:
        return ""
    if policy["pinned"]:
        return "pinned"
    if keep_alive_s < 0:
        return "for ever"
    used_at = view["used_at"] or view["created_at"]
    return duration_text(keep_alive_s) + (
        f", last used {duration_text(max(0.0, now_s - used_at))} ago"
        if view["state"] == "ready"
        else ""
    )


def show_model(view: Any, numbers: dict[str, int], detail: PlanRows = SHORT_DETAIL) -> None:
    """Print the state of a model.

    numbers: the number that nvidia-smi gives each GPU, by UUID.
    detail: the rows of its plan to print.
    """
    import time

    from gateway.domain import ExpectedStart, Plan

    print_paragraph(f"{view['name']}: {status_text(view)}")
    for start in [replica["start"] for replica in view["replicas"] if replica["start"]]:
        print_paragraph(start_text(start))
    if change := view["change"]:
        state = "Change in progress" if change["state"] == "underway" else "The last change failed"
        print_paragraph(f"{state}: {change['detail']}")
        show_changes(change["wish"])
    _show_wish(view, numbers)
    if keep_alive := keep_alive_text(view, time.time()):
        priority = view["wish"]["policy"]["priority"]
        suffix = f"; priority {priority}" if priority else ""
        print_paragraph(f"stays loaded: {keep_alive}{suffix}")
    if copies := view.get("copies"):
        print_paragraph(copies["words"])
    if view["plan"]:
        start = ExpectedStart.model_validate(view["start"])
        show_plan(Plan.model_validate(view["plan"]), start=start, detail=detail)
    if view["abilities"]:
        say("\nFor apps")
        rows = [
            (f"  {_ABILITIES[name]}", ability["state"], ability["evidence"])
            for name, ability in view["abilities"].items()
        ]
        print_table(("", "", ""), rows)
    if rival := view["rival"]:
        say("\nAnother plan should be better")
        print_paragraph(f"{rival['words']} {rival['command']}", indent=2, first="  ")
    _show_refusals(view["decision"])
    if view["attempts"]:
        say("\nAttempts")
        for attempt in view["attempts"]:
            _show_attempt(attempt)


def _show_wish(view: Any, numbers: dict[str, int]) -> None:
    wish = view["wish"]
    for name, commit in wish["commits"].items():
        print_paragraph(f"{name} is pinned to commit {commit}")
    for endpoint in wish["endpoints"]:
        print_paragraph(f"runs at {endpoint}")
    if key := wish["endpoint_key"]:
        print_paragraph(f"its key is {key}")
    if isinstance(wish["gpus"], list):
        print_paragraph(f"may use {_gpu_numbers_text(wish['gpus'], numbers)}")
    if planned_gpus := [uuid for replica in view["replicas"] for uuid in replica["gpus"]]:
        print_paragraph(f"planned on {_gpu_numbers_text(planned_gpus, numbers)}")


def _show_refusals(decision: Any) -> None:
    """The plans that an engine's own code refused."""
    from gateway.domain import RejectedPlan
    from gateway.planner import explain

    rejections = tuple(
        RejectedPlan.model_validate(rejection)
        for rejection in (decision or {}).get("rejected", ())
        if rejection["verdict"] == "engine_refuses"
    )
    if not rejections:
        return
    say("\nRefused by the engine's own code")
    for rejection in explain.rejections(rejections):
        texts = [f"{rejection.candidates}:", *(line.strip() for line in rejection.lines)]
        print_paragraph(" ".join(texts), indent=4, first="  ")


def _show_attempt(attempt: Any) -> None:
    """Print an attempt with its failure, and the changes of the next plan."""
    import datetime

    from gateway.diagnosis.remedy import REACTIONS
    from gateway.planner import explain

    started_at = datetime.datetime.fromtimestamp(
        attempt["started_at"], tz=datetime.UTC
    ).astimezone()
    texts = [
        attempt["state"],
        attempt["engine"],
        explain.short_digest(attempt["digest"] or ""),
        f"context {attempt['max_model_len']:,}",
        attempt["default_differences"],
    ]
    print_paragraph(
        "  ".join(text for text in texts if text),
        indent=5,
        first=f"  {attempt['id']}  {started_at.strftime('%F %T')}  ",
    )
    if not (failure := attempt["failure"]):
        return
    head = f"{failure['kind']} while {phase_label(failure['phase'])}:"
    print_paragraph(
        f"{head} {failure['message']} {failure['advice']}",
        indent=11,
        first="     ",
    )
    if failure["line"]:
        print_paragraph(f"log: {failure['line']}", indent=11, first="     ")
    print_paragraph(f"done: {REACTIONS[failure['proves']]}", indent=11, first="     ")
    for number, step in enumerate(failure["steps"], 1):
        print_paragraph(f"{number}. {step}", indent=8, first="     ")
    if next_attempt := attempt["follows"]:
        print_paragraph(f"next: {next_attempt_text(next_attempt)}", indent=11, first="     ")
