"""What the command line prints: tables and plans for people. The facts come from
`planner/explain.py`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from gateway.cli.terminal import say, squeezed, wrapped
from gateway.cli.terminal import width as _width
from gateway.domain.units import words as size
from gateway.visible import visible_line


def status_text(view: Any) -> str:
    """The state of a model, with its reason in parentheses."""
    # A phase may begin with the state's own name.
    detail = visible_line(view["detail"] or "").removeprefix(view["state"]).removeprefix(": ")
    return f"{view['state']} ({detail})" if detail else str(view["state"])


def following_text(follows: Any) -> str:
    """What was started after a failure, in words."""
    named = {one["what"] for one in follows["differs"]}
    # A flag that only says what a choice has said already is left out.
    told = [
        one
        for one in follows["differs"]
        if one["what"].removeprefix("--").replace("-", " ") not in named - {one["what"]}
    ]
    words = [f"{one['what']} {one['old'] or 'unset'} -> {one['new'] or 'unset'}" for one in told]
    return f"attempt {follows['attempt']}, {'; '.join(words) or 'the same plan again'}"


def detail_text(view: Any) -> str:
    """What is to say of a model in its line: its state's reason, and what follows a failure while
    it does not serve yet."""
    after = [one["follows"] for one in view["replicas"] if one["follows"] and one["busy_with"]]
    words = [view["detail"]] if view["detail"] else []
    words += [f"after {follows['failure']}: {following_text(follows)}" for follows in after[:1]]
    return "; ".join(words)


def print_paragraph(text: object, *, indent: int = 0, first: str = "") -> None:
    """A paragraph that keeps to the terminal's width; `indent` is of its lines after the first,
    which begins with `first`."""
    width, begin, rest = _width(), first, " " * indent
    if width is None:
        say(f"{begin}{visible_line(text)}")
        return
    lines = wrapped(visible_line(text), width, begin, rest)
    say("\n".join(lines) if lines else begin.rstrip())


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    """Columns without a frame, which read well in a terminal and in a pipe. Where they are too wide
    for a terminal the last column wraps, or goes below,
    then the others wrap; and where not even that fits, each row is a paragraph."""
    lines = [
        [visible_line(cell) for cell in row]
        for row in ([head] if any(head) else []) + [tuple(row) for row in rows]
    ]
    if not lines:
        return
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
    left, width = sum(widths) + 2 * len(widths), _width()
    if width is not None and left > width:
        _narrow(lines, width, head)
        return
    for line in lines:
        start = "".join(f"{cell:<{size}}  " for cell, size in zip(line, widths, strict=False))
        if width is None or left + len(line[-1]) <= width:
            say(f"{start}{line[-1]}".rstrip())
        elif width - left >= max(_LEAST_COLUMN, *map(len, line[-1].split())):
            print_paragraph(line[-1], indent=left, first=start)
        else:
            say(start.rstrip())
            if line[-1]:
                print_paragraph(line[-1], indent=4, first="    ")


def _narrow(lines: list[list[str]], width: int, head: tuple[str, ...]) -> None:
    """A table of which not even the columns before the last fit."""
    long = max(len(line[-1]) for line in lines) > _LEAST_COLUMN
    columns = None if long else squeezed(lines, width)
    below = columns is None
    columns = columns or squeezed([line[:-1] for line in lines], width)
    for at, line in enumerate(lines):
        titles = at == 0 and any(head)
        if columns:
            say("\n".join(columns[at]))
        elif not titles:
            cells = zip(head[1:-1] if long else head[1:], line[1:], strict=False)
            named = [
                f"{name.lower()} {cell}".strip() for name, cell in cells if cell not in ("", "-")
            ]
            print_paragraph(f"{line[0]}: {', '.join(named)}", indent=4)
        if below and (columns or long) and not titles and line[-1] not in ("", "-"):
            print_paragraph(line[-1], indent=4, first="    ")


# A last column narrower than this goes below its row.
_LEAST_COLUMN = 30


def show_decision(decision: Any, *, as_json: bool) -> None:
    from gateway.planner import explain

    if as_json:
        say(decision.model_dump_json(by_alias=True, indent=2))
        return
    print_paragraph(explain.headline(decision))
    for words in explain.given_words(decision):
        print_paragraph(f"Before its start {words}.")
    if decision.plans:
        show_plan(decision.plans[0])
    elif not decision.rejected and decision.engines:
        print_paragraph("No engine that could serve it can be started here.")
    else:
        print_paragraph(
            "Allow another engine version, a shorter context or more GPUs; `fitserve matrix`"
            " compares machines and versions."
        )
    if out := explain.ways_out(decision):
        print_paragraph(f"{out}.")
    for line in explain.would_fit(decision):
        print_paragraph(line, indent=4 if line.startswith("  ") else 0)
    if missing := explain.not_here(decision):
        say("\nEngines that are not here")
        for line in missing:
            print_paragraph(line, indent=4, first="  ")
    if others := decision.plans[1:]:
        say(
            "\nOther plans"
            + (
                f" (the first {_MOST_OTHERS} of {len(others)})"
                if len(others) > _MOST_OTHERS
                else ""
            )
        )
        head = ("RANK", "ENGINE", "GPUS", "CONTEXT", "TOK/S", "IN ALL", "CHANGED")
        table(head, explain.others(others[:_MOST_OTHERS]))
    if decision.rejected:
        say("\nRejected")
        for refused in explain.rejections(decision.rejected):
            print_paragraph(f"{refused.verdict}: {refused.who}", indent=4, first="  ")
            for line in refused.lines:
                inner = "      " if line.startswith(" ") else "    "
                print_paragraph(line.strip(), indent=len(inner) + 2, first=inner)


_MOST_OTHERS = 8


def show_matrix(cells: Any, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps([cell.model_dump() for cell in cells], indent=2))
        return
    reasons: list[str] = [""]
    rows = [
        (
            _named(cell.model, [other.model for other in cells]),
            cell.hardware,
            str(cell.engine),
            cell.state if cell.state != "failing" else cell.verdict,
            f"TP={cell.tensor_parallel}"
            + (f" PP={cell.pipeline_parallel}" if cell.pipeline_parallel > 1 else ""),
            "" if cell.max_model_len is None else f"{cell.max_model_len:,}",
            _as_above(cell.why, reasons),
        )
        for cell in cells
    ]
    table(("MODEL", "HARDWARE", "ENGINE", "STATE", "GPUS", "CONTEXT", "WHY"), rows)


def _as_above(text: str, reasons: list[str]) -> str:
    """The text; in a terminal, where it is long, "as above" if the row above has the same.
    `reasons`: of the rows so far."""
    reasons.append(text)
    return "as above" if text and text == reasons[-2] and _width() else text


def _named(model: str, models: list[str]) -> str:
    """A model by the last part of its path, where that is enough to tell it from the others."""
    last = model.rstrip("/").rpartition("/")[2]
    return (
        model
        if any(other != model and other.rstrip("/").endswith(f"/{last}") for other in models)
        else last
    )


def show_plan(plan: Any) -> None:
    from gateway.planner import explain

    say("")
    table(("CHOICE", "VALUE", "WHY"), explain.choices(plan))
    if plan.kernels:
        _layers(
            "Kernels per rank",
            ("LAYER", "K x N", "SCHEME", "KERNEL"),
            explain.kernels(plan.kernels),
        )
    if plan.attention:
        _layers("Attention", ("LAYERS", "HEAD SIZE", "BACKEND"), explain.attention(plan.attention))
    say("\nMemory per device\n" + explain.memory_bar(plan.memory, min(60, (_width() or 80) - 16)))
    table(("", "", ""), explain.memory_rows(plan.memory))
    if plan.speed:
        say(
            "\nMeasured speed"
            if plan.speed.grade == "measured"
            else f"\nExpected speed ({plan.speed.grade})"
        )
        table(("", ""), [*explain.speed_rows(plan.speed), ("by", plan.speed.source)])
    elif unknown := explain.why_no_speed(plan):
        say("")
        print_paragraph(unknown, indent=4)
    if plan.warnings:
        say("")
    for warning in plan.warnings:
        print_paragraph(f"warning: {warning}", indent=4)
    if plan.advice:
        say("")
        print_paragraph(f"advice: {plan.advice}", indent=4)
    words = [
        *(f"{name}={shlex.quote(value)}" for name, value in plan.env.items()),
        shlex.join(plan.argv),
    ]
    say("\nEngine flags")
    # One line, however long: it is there to be copied.
    say(visible_line(" ".join(words)))


def _layers(title: str, head: tuple[str, ...], layers: Any) -> None:
    say(f"\n{title}" + (f" of {visible_line(layers.under)}" if layers.under else ""))
    table(head, layers.rows)
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


def show_differences(differences: Any) -> None:
    table(
        ("", "BEFORE", "AFTER"),
        [(one["what"], one["old"] or "-", one["new"] or "-") for one in differences],
    )


def residence_text(view: Any, now: float) -> str:
    """How long the model stays loaded."""
    from gateway.domain.units import in_words

    policy, keep_alive_s = view["wish"]["policy"], view["keep_alive"]
    if keep_alive_s is None:
        return ""
    if policy["pinned"]:
        return "pinned"
    if keep_alive_s < 0:
        return "for ever"
    since = view["used_at"] or view["created_at"]
    return in_words(keep_alive_s) + (
        f", asked {in_words(max(0.0, now - since))} ago" if view["state"] == "ready" else ""
    )


def show_model(view: Any, numbers: dict[str, int]) -> None:
    """numbers: of this machine's GPUs as nvidia-smi has them, by UUID."""
    import datetime
    import time

    from gateway.domain import Plan, Rejected
    from gateway.planner import explain

    print_paragraph(f"{view['name']}: {status_text(view)}")
    if change := view["change"]:
        state = "Being changed" if change["state"] == "underway" else "The last change was given up"
        print_paragraph(f"{state}: {change['detail']}")
        show_differences(change["wish"])
    for name, commit in view["wish"]["commits"].items():
        print_paragraph(f"{name} is pinned to commit {commit}")
    for endpoint in view["wish"]["endpoints"]:
        print_paragraph(f"runs at {endpoint}")
    if key := view["wish"]["endpoint_key"]:
        print_paragraph(f"its key is {key}")
    wished, taken = view["wish"]["gpus"], [uuid for one in view["replicas"] for uuid in one["gpus"]]
    if isinstance(wished, list):
        print_paragraph(f"may take {_gpus(wished, numbers)}")
    if taken:
        print_paragraph(f"planned on {_gpus(taken, numbers)}")
    if stays := residence_text(view, time.time()):
        priority = view["wish"]["policy"]["priority"]
        print_paragraph(f"stays loaded: {stays}" + (f"; priority {priority}" if priority else ""))
    if view["plan"]:
        show_plan(Plan.model_validate(view["plan"]))
    if view["abilities"]:
        say("\nFor apps")
        table(
            ("", "", ""),
            [
                (f"  {_ABILITIES[name]}", one["state"], one["evidence"])
                for name, one in view["abilities"].items()
            ],
        )
    if rival := view["rival"]:
        say("\nAnother plan should be better")
        print_paragraph(f"{rival['words']} {rival['do']}", indent=2, first="  ")
    refused = [
        one
        for one in (view["decision"] or {}).get("rejected", ())
        if one["verdict"] == "engine_refuses"
    ]
    if refused:
        say("\nRefused by the engine itself, when it was asked")
        for one in explain.rejections(tuple(Rejected.model_validate(one) for one in refused)):
            print_paragraph(
                " ".join([f"{one.who}:", *(line.strip() for line in one.lines)]),
                indent=4,
                first="  ",
            )
    if view["attempts"]:
        from gateway.diagnosis.remedy import DONE

        say("\nAttempts")
        for attempt in view["attempts"]:
            started = (
                datetime.datetime.fromtimestamp(attempt["started_at"], tz=datetime.UTC)
                .astimezone()
                .strftime("%F %T")
            )
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
                first=f"  {attempt['id']}  {started}  ",
            )
            if failure := attempt["failure"]:
                said = (
                    f"{failure['kind']} while {failure['phase']}: {failure['message']}"
                    f" {failure['advice']}"
                )
                print_paragraph(said, indent=11, first="     ")
                if failure["line"]:
                    print_paragraph(f"log: {failure['line']}", indent=11, first="     ")
                print_paragraph(f"done: {DONE[failure['proves']]}", indent=11, first="     ")
                for number, step in enumerate(failure["steps"], 1):
                    print_paragraph(f"{number}. {step}", indent=8, first="     ")
                if follows := attempt["follows"]:
                    print_paragraph(f"next: {following_text(follows)}", indent=11, first="     ")


def show_disk(found: Any) -> None:
    import datetime

    def day(at: float) -> str:
        return datetime.datetime.fromtimestamp(at, tz=datetime.UTC).astimezone().strftime("%F")

    rows = [
        (
            one["repo"],
            one["commit"][:12],
            size(one["bytes"]),
            day(one["last_used"]),
            ", ".join(one["models"])
            or ("no model" if one["ours"] else "no model, brought by another program"),
        )
        for one in found["revisions"]
    ]
    table(("REPOSITORY", "COMMIT", "BYTES", "LAST USED", "NEEDED BY"), rows)
    engines = [
        (
            one["name"],
            size(one["bytes"]),
            size(one["caches_bytes"]),
            day(one["last_used"]),
            ", ".join(one["models"]) or "no model",
        )
        for one in found["engines"]
    ]
    if engines:
        say("")
        table(("ENGINE", "BYTES", "COMPILED", "LAST USED", "NEEDED BY"), engines)
    unfinished = (
        f", {size(found['unfinished_bytes'])} of unfinished downloads"
        if found["unfinished_bytes"]
        else ""
    )
    say("")
    print_paragraph(
        f"{found['cache']}: {size(found['cache_bytes'])}{unfinished}; {size(found['free_bytes'])}"
        " are free"
    )
    if found["unused_bytes"]:
        print_paragraph(
            f"{size(found['unused_bytes'])} of revisions that no model of this gateway needs:"
            " `fitserve rm NAME --weights` removes those of a model with it, `hf cache rm` those"
            " of other programs.",
            indent=0,
        )


def removed_weights(answer: Any) -> str:
    gone = ", ".join(f"{repo} at {commit[:12]}" for repo, commit in answer["removed"])
    kept = [f"{one['repo']} stays: {', '.join(one['models'])} needs it" for one in answer["kept"]]
    return "; ".join(
        [
            f"{answer['name']}: removed, {size(answer['freed_bytes'])} freed"
            + (f" ({gone})" if gone else ""),
            *kept,
        ]
    )
