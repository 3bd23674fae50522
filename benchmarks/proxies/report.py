"""The table of a run in Markdown, and the reached targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from parts import Figures, Size

Results = Mapping[str, Figures]
"""Medians by target, in the order of the columns."""


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def table(results: Results, size: Size, about: Mapping[str, str]) -> str:
    def ratio(figures: Figures, name: str, digits: int) -> str:
        value, reference = figures.get(name), results.get("nginx", {}).get(name)
        return number(value, digits) + (
            f" ({value / reference:.2f}x)" if value is not None and reference else ""
        )

    def added_text(figures: Figures) -> str:
        value = figures.get("latency_p50_ms")
        reference = results.get("nginx", {}).get("latency_p50_ms")
        return number(value, 3) + (
            f" ({value - reference:+.3f})" if value is not None and reference is not None else ""
        )

    def idle(figures: Figures) -> str:
        text = number(figures.get("idle_kib"), 1)
        is_short = figures.get("idle_open") != figures.get("idle_wanted")
        return text + (f" ({number(figures.get('idle_open'), 0)} open)" if is_short else "")

    rows: dict[str, Callable[[Figures], str]] = {
        "CPU per request, us (x nginx)": lambda f: ratio(f, "request_us", 1),
        "CPU per streamed chunk, us (x nginx)": lambda f: ratio(f, "chunk_us", 1),
        "p50 at one connection, ms (over nginx)": added_text,
        "requests/s, 32 connections": lambda f: number(f.get("requests_per_s"), 0),
        f"{size.many:,} streams x 20 chunks/s x {size.many_s:g} s: errors": lambda f: number(
            f.get("streams_errors"), 0
        ),
        "... resident, MiB": lambda f: number(f.get("streams_rss_mib"), 0),
        "... CPU cores": lambda f: number(f.get("streams_cores"), 2),
        "... slowest hundredth took, s": lambda f: number(f.get("streams_p99_s"), 1),
        f"{size.idle:,} idle streams, KiB each": idle,
        "10 MiB body, p50 ms (x nginx)": lambda f: ratio(f, "body_p50_ms", 1),
        "... resident growth, MiB": lambda f: number(f.get("body_growth_mib"), 0),
    }
    lines = ["| | " + " | ".join(results) + " |", "| --- |" + " --- |" * len(results)]
    for title, cell in rows.items():
        cells = [cell(figures) for figures in results.values()]
        if any(text != "-" for text in cells):
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += ["", "Targets: " + "; ".join(f"{name} {text}" for name, text in about.items()) + "."]
    return "\n".join(lines)


def verdicts(results: Results) -> list[str]:
    """A line for each target that this run can judge."""
    ours, nginx, direct = (results.get(name, {}) for name in ("fitserve", "nginx", "direct"))
    routers = [
        f["request_us"]
        for name, f in results.items()
        if name.endswith("-router") and f.get("request_us")
    ]
    best_router = min((value for value in routers if value is not None), default=None)
    lines = []

    def judge(what: str, value: float | None, limit: float | None, digits: int = 2) -> None:
        if value is not None and limit is not None:
            verdict = "reached" if value <= limit else "MISSED"
            lines.append(
                f"{what}: {number(value, digits)}, to reach {number(limit, digits)}: {verdict}"
            )

    def ratio_to(name: str, reference: float | None) -> float | None:
        value = ours.get(name)
        return value / reference if value is not None and reference else None

    judge("CPU per request, x nginx", ratio_to("request_us", nginx.get("request_us")), 1.5)
    judge("CPU per request, x the better Rust router", ratio_to("request_us", best_router), 0.5)
    judge("CPU per streamed chunk, x nginx", ratio_to("chunk_us", nginx.get("chunk_us")), 1.3)
    p50, reference = ours.get("latency_p50_ms"), nginx.get("latency_p50_ms")
    judge(
        "p50 over nginx at one connection, ms",
        p50 - reference if p50 is not None and reference is not None else None,
        0.15,
        3,
    )
    judge("many streams: errors", ours.get("streams_errors"), 0, 0)
    judge("many streams: resident, MiB", ours.get("streams_rss_mib"), 150, 0)
    judge("idle streams, KiB each", ours.get("idle_kib"), 40, 1)
    judge("10 MiB body, p50 x nginx", ratio_to("body_p50_ms", nginx.get("body_p50_ms")), 2)
    judge("10 MiB body, resident growth, MiB", ours.get("body_growth_mib"), 64, 0)
    alone = direct.get("requests_per_s")
    rates = [f.get("requests_per_s") or 0 for name, f in results.items() if name != "direct"]
    if alone and rates:
        times = alone / max(*rates, 1)
        verdict = (
            "the engine is not a bottleneck"
            if times > 1
            else "THE ENGINE IS THE BOTTLENECK, rates and latencies say nothing"
        )
        lines.append(
            f"requests/s of the fake engine alone, x the fastest proxy: {times:.2f}: {verdict}"
        )
    return lines


def put_section(page: Path, title: str, text: str) -> None:
    """Replace the section `## title` of a page, or add it at the end."""
    section = f"## {title}\n\n{text.rstrip()}\n"
    old = page.read_text()
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    new = (
        pattern.sub(lambda _: section + "\n", old)
        if pattern.search(old)
        else f"{old.rstrip()}\n\n{section}"
    )
    page.write_text(new.rstrip() + "\n")
