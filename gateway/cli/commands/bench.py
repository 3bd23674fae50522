"""`fitserve bench`: what a served model does, through the gateway and its streams, beside what was
expected and what it did the last time."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any

import typer

from gateway.cli.client import address, call, of_model, text
from gateway.cli.options import Json
from gateway.cli.present import print_paragraph, status_text, table
from gateway.cli.terminal import say
from gateway.errors import NotReady

# What /metrics tells of requests that ended; a request without a model reached no engine.
_ENDED = re.compile(r'^fitserve_requests_total\{model="[^"]+".*\} (\S+)$', re.MULTILINE)
# Workers report their counts twice a second.
_REPORTED_S = 3.0


def bench(
    name: str,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="Of each number of requests at once.")
    ] = 5,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=4096, help="Requests at once; repeatable. Default: 1, 8, and as planned."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a model that is served: first tokens, one answer alone, many at once. It is kept, and
    plans are made with it.

    Prompts are random, answers have one length. While other requests run the numbers are shown, and
    nothing is learned from them.
    """
    import asyncio

    from gateway.domain import BenchReport
    from gateway.measuring.bench.measure import Load
    from gateway.measuring.bench.streamed_answer import Target

    view = call("GET", of_model(name))
    if view["state"] != "ready":
        raise NotReady(
            f"{name} is not ready: {status_text(view)}.", hint=f"`fitserve show {name}` says more."
        )
    plan = view["plan"]
    if plan is not None and plan["model"]["task"] != "generate":
        raise NotReady(
            f"{name} generates no text, so there is nothing to measure.",
            hint="Measure a model that generates.",
        )
    url, key = address()
    context = plan["max_model_len"]["value"] if plan else 4096
    target = Target(url, name, key, plan["model"]["vocab"] if plan else 20_000)
    load = Load(target, context, lambda what: None if as_json else say(f"{name}: {what}", err=True))
    planned = _planned(plan, view) if plan else 32
    before = _ended()
    report = asyncio.run(
        load.measure(sorted(set(concurrency or (1, min(8, planned), planned))), seconds)
    )
    others = _others(before, load.asked)
    fields = {**report.model_dump(), "disturbed": others, "fingerprint": _fingerprint(view)}
    kept = call(
        "POST", of_model(name, "/bench"), BenchReport.model_validate(fields).model_dump(mode="json")
    )
    expected = plan["speed"] if plan else None
    if as_json:
        say(json.dumps({**kept, "expected": expected}, indent=2))
        return
    _show(kept, expected)


def _planned(plan: Any, view: Any) -> int:
    """Requests at once that the plan is for, as far as its engines take them."""
    if plan["speed"]:
        return int(plan["speed"]["concurrency"])
    most = plan["max_num_seqs"]["value"] * max(1, len(view["replicas"]))
    return int(min(view["wish"]["concurrency"] or 32, most))


def _fingerprint(view: Any) -> str | None:
    serving = [one["attempt"] for one in view["replicas"] if one["state"] == "ready"]
    return next((one["fingerprint"] for one in view["attempts"] if one["id"] in serving), None)


def _ended() -> int:
    """Requests that the gateway has answered so far."""
    return round(math.fsum(map(float, _ENDED.findall(text("/metrics")))))


def _others(before: int, own: int) -> str:
    """Whether others asked something meanwhile, in words."""
    import time

    until = time.monotonic() + _REPORTED_S
    while (count := _ended() - before) < own and time.monotonic() < until:
        time.sleep(0.1)
    running = re.findall(
        r'^fitserve_requests_in_flight\{model="[^"]+"\} ([1-9]\S*)$', text("/metrics"), re.MULTILINE
    )
    if count == own and not running:
        return ""
    return (
        f"{max(0, count - own)} other requests ended meanwhile, and"
        f" {round(math.fsum(map(float, running)))} run still"
    )


def _show(kept: Any, expected: Any) -> None:
    bench, last = kept["bench"], kept["last"] or {}
    print_paragraph(
        f"{bench['model']}: prompts of {bench['prompt']:,} tokens, answers of {bench['answer']:,},"
        f" {bench['engine'] or 'an endpoint'}"
    )
    rows: list[tuple[object, ...]] = []

    def row(what: str, unit: str, value: float | None, planned: Any, before: float | None) -> None:
        if value is not None:
            hoped = f"{planned['value']:,g}" if planned else "-"
            off = f"{100 * (value / planned['value'] - 1):+.0f} %" if planned else "-"
            rows.append(
                (what, f"{value:,.4g} {unit}", hoped, off, f"{before:,.4g}" if before else "-")
            )

    hopes = _unmeasured(expected) if expected else {}
    row(
        "first token, 2k",
        "s",
        bench["first_token_2k_s"],
        hopes.get("first_token_2k_s"),
        last.get("first_token_2k_s"),
    )
    row(
        "first token, 32k",
        "s",
        bench["first_token_32k_s"],
        hopes.get("first_token_32k_s"),
        last.get("first_token_32k_s"),
    )
    row("one request", "tokens/s", bench["stream"], hopes.get("stream"), last.get("stream"))
    old = {level["concurrency"]: level["tokens_per_s"] for level in last.get("levels", ())}
    for level in bench["levels"]:
        count = level["concurrency"]
        hoped = hopes.get("total") if hopes.get("concurrency") == count else None
        row(f"{count:,} at once", "tokens/s", level["tokens_per_s"], hoped, old.get(count))
    table(("", "NOW", "EXPECTED", "OFF", "LAST"), rows)
    say("")
    latencies = [
        (f"{one['concurrency']:,}", one["requests"], *_seconds(one)) for one in bench["levels"]
    ]
    table(("AT ONCE", "REQUESTS", "LATENCY P50", "P95", "FIRST TOKEN P50", "P95"), latencies)
    if kept["not_learned"]:
        print_paragraph(f"\nNothing was learned from it: {kept['not_learned']}.")
    if rival := kept["rival"]:
        say("")
        print_paragraph(f"Another plan should be better. {rival['words']} {rival['do']}")


def _unmeasured(speed: Any) -> Any:
    """What was expected before anything was measured of it."""
    if speed["grade"] != "measured":
        return speed
    values = {
        name: {"value": float(f"{speed[name]['value'] / ratio:.3g}")}
        for name, ratio in speed["ratios"].items()
        if speed[name]
    }
    return {"concurrency": speed["concurrency"], **values}


def _seconds(level: Any) -> list[str]:
    names = ("latency_p50_s", "latency_p95_s", "first_token_p50_s", "first_token_p95_s")
    return [f"{level[name]:.3g} s" for name in names]
