"""Tables and plans for people, with the words of `planner/explain.py`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from gateway.cli.terminal import line_width as _width
from gateway.cli.terminal import say, squeeze, wrap
from gateway.domain.phases import phase_label
from gateway.domain.units import in_words
from gateway.domain.units import words as size
from gateway.visible import visible_line


def status_text(view: Any) -> str:
    """The state of a model, with its reason in parentheses."""
    # The detail may begin with the state itself.
    detail = visible_line(_own_detail(view)).removeprefix(view["state"]).removeprefix(": ")
    return f"{view['state']} ({detail})" if detail else str(view["state"])


def _own_detail(view: Any) -> str:
    """The detail of a model; "": it is the phase of a start, which `start_text` says with its
    seconds."""
    starts = [replica["start"] for replica in view.get("replicas", ()) if replica.get("start")]
    phases = [phase_label(start["phase"]) for start in starts if start["phase"] is not None]
    detail = str(view["detail"] or "")
    return "" if detail in phases[:1] else detail


def next_attempt_text(follows: Any) -> str:
    """The attempt after a failure, and how its plan differs."""
    choices = {change["what"] for change in follows["differs"]}
    # A flag that repeats a choice is left out.
    changes = [
        change
        for change in follows["differs"]
        if change["what"].removeprefix("--").replace("-", " ") not in choices - {change["what"]}
    ]
    words = [
        f"{change['what']} {change['old'] or 'unset'} -> {change['new'] or 'unset'}"
        for change in changes
    ]
    return f"attempt {follows['attempt']}, {'; '.join(words) or 'the same plan again'}"


def detail_text(view: Any) -> str:
    """The detail column of a model: the reason of its state, and the attempt after a failure."""
    retries = [
        replica["follows"]
        for replica in view["replicas"]
        if replica["follows"] and replica["busy_with"]
    ]
    words = [_own_detail(view)]
    words += [
        f"after {follows['failure']}: {next_attempt_text(follows)}" for follows in retries[:1]
    ]
    words += [
        start_text(copy_view["start"]) for copy_view in view["replicas"] if copy_view.get("start")
    ][:1]
    return "; ".join(filter(None, words))


def start_text(start: Any) -> str:
    """The phase of a start, with elapsed and expected seconds; "": nothing is known yet."""
    phase, expected = start["phase"], start["expected"]
    words = []
    if phase is not None:
        usual_s = expected["phases"].get(phase) if expected is not None else None
        usual = f" of {in_words(usual_s)}" if usual_s else ""
        words.append(f"{phase_label(phase)} {in_words(start['elapsed_s'])}{usual}")
    if expected is not None:
        passed = f"{in_words(start['total_s'])} of " if phase is not None else "the start takes "
        low, high = (in_words(expected[name]) for name in ("low_s", "high_s"))
        words.append(f"{passed}{low if low == high else f'{low} to {high}'} in all")
        words += _GRADES.get(expected["grade"], ())
    if start["conditions"]["is_cache_empty"]:
        words.append("nothing is compiled yet")
    return ", ".join(words)


_GRADES = {
    "estimate": ("an estimate",),
    "elsewhere": ("measured on another machine", "without reading weights"),
}


def expected_start_text(start: Any) -> str:
    """How long a start takes that has not begun, or that nobody knows. start: of a decision."""
    expectation = {"phase": None, "expected": start["time"], "conditions": start["conditions"]}
    words = start_text(expectation)
    if start["time"] is None:
        words = ", ".join(
            filter(None, (words, "no start like it was measured here, so its time is unknown"))
        )
    return f"{words[:1].upper()}{words[1:]}."


def print_paragraph(text: object, *, indent: int = 0, first: str = "") -> None:
    """Print a paragraph, wrapped for a terminal. first: the start of its first line. indent: of the
    lines after it."""
    width, begin, rest = _width(), first, " " * indent
    if width is None:
        say(f"{begin}{visible_line(text)}")
        return
    lines = wrap(visible_line(text), width, begin, rest)
    say("\n".join(lines) if lines else begin.rstrip())


def print_table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    """Print columns without a frame.

    In a narrow terminal the last column wraps or moves below its row, then the other columns wrap.
    Rows that do not fit even so become paragraphs.
    """
    lines = [
        [visible_line(cell) for cell in row]
        for row in ([head] if any(head) else []) + [tuple(row) for row in rows]
    ]
    if not lines:
        return
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
    indent, width = sum(widths) + 2 * len(widths), _width()
    if width is not None and indent > width:
        _print_narrow_table(lines, width, head)
        return
    for line in lines:
        start = "".join(f"{cell:<{size}}  " for cell, size in zip(line, widths, strict=False))
        if width is None or indent + len(line[-1]) <= width:
            say(f"{start}{line[-1]}".rstrip())
        elif width - indent >= max(_MIN_LAST_COLUMN, *map(len, line[-1].split())):
            print_paragraph(line[-1], indent=indent, first=start)
        else:
            say(start.rstrip())
            if line[-1]:
                print_paragraph(line[-1], indent=4, first="    ")


def _print_narrow_table(lines: list[list[str]], width: int, head: tuple[str, ...]) -> None:
    """Print a table whose columns before the last are too wide."""
    long = max(len(line[-1]) for line in lines) > _MIN_LAST_COLUMN
    columns = None if long else squeeze(lines, width)
    separate_last = columns is None
    columns = columns or squeeze([line[:-1] for line in lines], width)
    for number, line in enumerate(lines):
        titles = number == 0 and any(head)
        if columns:
            say("\n".join(columns[number]))
        elif not titles:
            cells = zip(head[1:-1] if long else head[1:], line[1:], strict=False)
            parts = [
                f"{name.lower()} {cell}".strip() for name, cell in cells if cell not in ("", "-")
            ]
            print_paragraph(f"{line[0]}: {', '.join(parts)}", indent=4)
        if separate_last and (columns or long) and not titles and line[-1] not in ("", "-"):
            print_paragraph(line[-1], indent=4, first="    ")


UNREHEARSED = "The check before the start leaves out"

# A last column narrower than this moves below its row.
_MIN_LAST_COLUMN = 30


def show_decision(decision: Any, *, as_json: bool) -> None:
    from gateway.planner import explain

    if as_json:
        say(decision.model_dump_json(by_alias=True, indent=2))
        return
    print_paragraph(explain.headline(decision))
    for words in explain.offer_words(decision):
        print_paragraph(f"Before its start {words}.")
    if decision.plans:
        show_plan(decision.plans[0], decision.why_gpus, decision.start)
    elif not decision.rejected and decision.engines:
        print_paragraph("No engine for this model can be started here.")
    else:
        print_paragraph(
            "Allow another engine version, a shorter context or more GPUs; `fitserve matrix`"
            " compares machines and versions."
        )
    if remedies := explain.ways_out(decision):
        print_paragraph(f"{remedies}.")
    for line in explain.would_fit(decision):
        print_paragraph(line, indent=4 if line.startswith("  ") else 0)
    if missing := explain.not_here(decision):
        say("\nEngines that are not installed")
        for line in missing:
            print_paragraph(line, indent=4, first="  ")
    if len(decision.plans) > 1:
        rows = explain.shapes(decision.plans)
        rest = f" (the first {_MOST_SHAPES} of {len(rows)})" if len(rows) > _MOST_SHAPES else ""
        say(f"\nPlans by shape{rest}")
        head = ("RANK", "GPUS", "LAYOUT", "CONTEXT", "TOK/S", "IN ALL", "ENGINES")
        print_table(head, rows[:_MOST_SHAPES])
    if decision.rejected:
        say("\nRejected")
        for rejection in explain.rejections(decision.rejected):
            print_paragraph(f"{rejection.verdict}: {rejection.candidates}", indent=4, first="  ")
            for line in rejection.lines:
                inner = "      " if line.startswith(" ") else "    "
                print_paragraph(line.strip(), indent=len(inner) + 2, first=inner)


_MOST_SHAPES = 8


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
            _or_as_above(cell.why, reasons),
        )
        for cell in cells
    ]
    print_table(("MODEL", "HARDWARE", "ENGINE", "STATE", "GPUS", "CONTEXT", "WHY"), rows)


def _or_as_above(text: str, reasons: list[str]) -> str:
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


def show_plan(plan: Any, why_gpus: str = "", start: Any = None) -> None:
    """Print a plan. why_gpus, start: of its decision."""
    from gateway.planner import explain

    say("")
    origin = start.conditions.origin if start is not None else None
    print_table(("CHOICE", "VALUE", "WHY"), explain.choices(plan, why_gpus, origin))
    if plan.kernels:
        _show_layers(
            "Kernels per rank",
            ("LAYER", "K x N", "SCHEME", "KERNEL"),
            explain.kernels(plan.kernels),
        )
    if plan.attention:
        _show_layers(
            "Attention", ("LAYERS", "HEAD SIZE", "BACKEND"), explain.attention(plan.attention)
        )
    say("\nMemory per device\n" + explain.memory_bar(plan.memory, min(60, (_width() or 80) - 16)))
    print_table(("", "", ""), explain.memory_rows(plan.memory))
    if plan.speed:
        say(
            "\nMeasured speed"
            if plan.speed.grade == "measured"
            else f"\nExpected speed ({plan.speed.grade})"
        )
        print_table(("", ""), [*explain.speed_rows(plan.speed), ("by", plan.speed.source)])
    elif unknown := explain.why_no_speed(plan):
        say("")
        print_paragraph(unknown, indent=4)
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
        say(f"\n{UNREHEARSED}")
    for stage in plan.unrehearsed:
        print_paragraph(stage, indent=2, first="  ")
    words = [
        *(f"{name}={shlex.quote(value)}" for name, value in plan.env.items()),
        shlex.join(plan.argv),
    ]
    say("\nEngine flags")
    # Never wrapped, so that users can copy the line.
    say(visible_line(" ".join(words)))


def _show_layers(title: str, head: tuple[str, ...], layers: Any) -> None:
    say(f"\n{title}" + (f" of {visible_line(layers.prefix)}" if layers.prefix else ""))
    print_table(head, layers.rows)
    for number, note in enumerate(layers.notes, start=1):
        print_paragraph(note, indent=4, first=f"({number}) ")


_ABILITIES = {
    "tools": "tool calls",
    "required_tools": "required tool calls",
    "reasoning": "thoughts apart",
    "json_schema": "answers by a schema",
}


def _gpus(uuids: list[str], numbers: dict[str, int]) -> str:
    return ", ".join(f"GPU {numbers[uuid]} ({uuid})" if uuid in numbers else uuid for uuid in uuids)


def show_changes(changes: Any) -> None:
    """Print a table of old and new values."""
    print_table(
        ("", "BEFORE", "AFTER"),
        [(change["what"], change["old"] or "-", change["new"] or "-") for change in changes],
    )


def keep_alive_text(view: Any, now_s: float) -> str:
    """How long the model stays loaded without a request."""
    from gateway.domain.units import in_words

    policy, keep_alive_s = view["wish"]["policy"], view["keep_alive"]
    if keep_alive_s is None:
        return ""
    if policy["pinned"]:
        return "pinned"
    if keep_alive_s < 0:
        return "for ever"
    used_at = view["used_at"] or view["created_at"]
    return in_words(keep_alive_s) + (
        f", last used {in_words(max(0.0, now_s - used_at))} ago" if view["state"] == "ready" else ""
    )


def show_model(view: Any, numbers: dict[str, int]) -> None:
    """Print everything about a model. numbers: of GPUs in nvidia-smi, by UUID."""
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
    if view["plan"]:
        start = ExpectedStart.model_validate(view["start"])
        show_plan(Plan.model_validate(view["plan"]), start=start)
    if view["abilities"]:
        say("\nFor apps")
        rows = [
            (f"  {_ABILITIES[name]}", ability["state"], ability["evidence"])
            for name, ability in view["abilities"].items()
        ]
        print_table(("", "", ""), rows)
    if rival := view["rival"]:
        say("\nAnother plan should be better")
        print_paragraph(f"{rival['words']} {rival['do']}", indent=2, first="  ")
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
        print_paragraph(f"may use {_gpus(wish['gpus'], numbers)}")
    if planned := [uuid for replica in view["replicas"] for uuid in replica["gpus"]]:
        print_paragraph(f"planned on {_gpus(planned, numbers)}")


def _show_refusals(decision: Any) -> None:
    """The plans that an engine's own code refused."""
    from gateway.domain import Rejected
    from gateway.planner import explain

    rejected = tuple(
        Rejected.model_validate(rejection)
        for rejection in (decision or {}).get("rejected", ())
        if rejection["verdict"] == "engine_refuses"
    )
    if not rejected:
        return
    say("\nRefused by the engine's own code")
    for rejection in explain.rejections(rejected):
        words = [f"{rejection.candidates}:", *(line.strip() for line in rejection.lines)]
        print_paragraph(" ".join(words), indent=4, first="  ")


def _show_attempt(attempt: Any) -> None:
    import datetime

    from gateway.diagnosis.remedy import REACTIONS
    from gateway.planner import explain

    started = datetime.datetime.fromtimestamp(attempt["started_at"], tz=datetime.UTC).astimezone()
    words = [
        attempt["state"],
        attempt["engine"],
        explain.short(attempt["digest"] or ""),
        f"context {attempt['max_model_len']:,}",
        attempt["otherwise"],
    ]
    print_paragraph(
        "  ".join(word for word in words if word),
        indent=5,
        first=f"  {attempt['id']}  {started.strftime('%F %T')}  ",
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
    if follows := attempt["follows"]:
        print_paragraph(f"next: {next_attempt_text(follows)}", indent=11, first="     ")


def show_disk(usage: Any) -> None:
    """Print the disk usage of weights and engines."""
    import datetime

    def day(time_s: float) -> str:
        return datetime.datetime.fromtimestamp(time_s, tz=datetime.UTC).astimezone().strftime("%F")

    rows = [
        (
            revision["repo"],
            revision["commit"][:12],
            size(revision["bytes"]),
            day(revision["last_used"]),
            ", ".join(revision["models"])
            or ("no model" if revision["ours"] else "no model, brought by another program"),
        )
        for revision in usage["revisions"]
    ]
    print_table(("REPOSITORY", "COMMIT", "BYTES", "LAST USED", "NEEDED BY"), rows)
    for revision in usage["revisions"]:
        if missing := revision["missing"]:
            rest = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
            print_paragraph(
                f"{revision['repo']} at {revision['commit'][:12]} is damaged: {missing[0]}{rest} is"
                f" gone from the cache. `fitserve pull {revision['repo']}` downloads it again."
            )
    engines = [
        (
            engine["name"],
            size(engine["bytes"]),
            size(engine["caches_bytes"]),
            day(engine["last_used"]),
            ", ".join(engine["models"]) or "no model",
        )
        for engine in usage["engines"]
    ]
    if engines:
        say("")
        print_table(("ENGINE", "BYTES", "COMPILED", "LAST USED", "NEEDED BY"), engines)
    unfinished = (
        f", {size(usage['unfinished_bytes'])} of unfinished downloads"
        if usage["unfinished_bytes"]
        else ""
    )
    say("")
    print_paragraph(
        f"{usage['cache']}: {size(usage['cache_bytes'])}{unfinished};"
        f" {size(usage['free_bytes'])} are free"
    )
    if usage["unused_bytes"]:
        print_paragraph(
            f"{size(usage['unused_bytes'])} of revisions are needed by no model of this gateway."
            " `fitserve rm NAME --weights` deletes a model with its revisions; `hf cache rm`"
            " deletes those of other programs."
        )


def removal_text(answer: Any) -> str:
    """The result of `fitserve rm --weights`: freed bytes and remaining revisions."""
    removed = ", ".join(f"{repo} at {commit[:12]}" for repo, commit in answer["removed"])
    remaining = [
        f"{revision['repo']} stays: {', '.join(revision['models'])} needs it"
        for revision in answer["kept"]
    ]
    freed = f"{answer['name']}: removed, {size(answer['freed_bytes'])} freed"
    return "; ".join([freed + (f" ({removed})" if removed else ""), *remaining])
