"""Disk usage of weights and engines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.cli.terminal import say
from gateway.cli.text_tables import print_paragraph, print_table
from gateway.domain.units import format_bytes


def show_disk(usage: Mapping[str, Any]) -> None:
    """Print the disk usage of weights and engines."""
    _show_revisions(usage["revisions"])
    _show_engines(usage["engines"])
    _show_totals(usage)


def _show_revisions(revisions: Sequence[Mapping[str, Any]]) -> None:
    """Print the downloaded revisions and the models that need them."""
    rows = [
        (
            revision["repo"],
            revision["commit"][:12],
            format_bytes(revision["bytes"]),
            _day(revision["last_used"]),
            ", ".join(revision["models"])
            or (
                "no model"
                if revision["is_from_fitserve"]
                else "no model, brought by another program"
            ),
        )
        for revision in revisions
    ]
    print_table(
        ("REPOSITORY", "COMMIT", "BYTES", "LAST USED", "NEEDED BY"),
        rows,
        empty="No repository was downloaded.",
    )
    for revision in revisions:
        if missing_files := revision["missing"]:
            suffix = f" and {len(missing_files) - 1} more files" if len(missing_files) > 1 else ""
            print_paragraph(
                f"{revision['repo']} at {revision['commit'][:12]} is damaged:"
                f" {missing_files[0]}{suffix} is gone from the cache. `fitserve pull"
                f" {revision['repo']}` downloads it again."
            )


def _show_engines(engines: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            engine["name"],
            format_bytes(engine["bytes"]),
            format_bytes(engine["caches_bytes"]),
            _day(engine["last_used"]),
            ", ".join(engine["models"]) or "no model",
        )
        for engine in engines
    ]
    if rows:
        say("")
        print_table(("ENGINE", "BYTES", "COMPILED", "LAST USED", "NEEDED BY"), rows)


def _show_totals(usage: Mapping[str, Any]) -> None:
    unfinished_words = (
        f", {format_bytes(usage['unfinished_bytes'])} of unfinished downloads"
        if usage["unfinished_bytes"]
        else ""
    )
    say("")
    print_paragraph(
        f"{usage['cache']}: {format_bytes(usage['cache_bytes'])}{unfinished_words};"
        f" {format_bytes(usage['free_bytes'])} are free"
    )
    if usage["unused_bytes"]:
        print_paragraph(
            f"{format_bytes(usage['unused_bytes'])} of revisions are needed by no model of this"
            " gateway. `fitserve rm NAME --weights` deletes a model with its revisions;"
            " `hf cache rm` deletes those of other programs."
        )


def _day(time_s: float) -> str:
    """The local date of a Unix time."""
    return datetime.fromtimestamp(time_s, tz=UTC).astimezone().strftime("%F")


def removal_text(answer: Any) -> str:
    """The result of `fitserve rm --weights`: freed bytes and remaining revisions."""
    removed_revisions = ", ".join(f"{repo} at {commit[:12]}" for repo, commit in answer["removed"])
    remaining = [
        f"{revision['repo']} stays: {', '.join(revision['models'])} needs it"
        for revision in answer["kept"]
    ]
    summary = f"{answer['name']}: removed, {format_bytes(answer['freed_bytes'])} freed"
    return "; ".join(
        [summary + (f" ({removed_revisions})" if removed_revisions else ""), *remaining]
    )
