"""`fitserve bench`: the measured speed of a model, compared with forecast and last measurement."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any

import typer

from gateway.cli.client import address, call, get_text, model_path
from gateway.cli.model_output import status_text
from gateway.cli.options import Json, ModelName
from gateway.cli.terminal import say
from gateway.cli.text_tables import print_paragraph, print_table
from gateway.errors import NotReady

# Ended requests in /metrics; a request without a model reached no engine.
_ENDED_REQUESTS = re.compile(r'^fitserve_requests_total\{model="[^"]+".*\} (\S+)$', re.MULTILINE)
# Workers report their counts twice a second.
_REPORT_TIMEOUT_S = 3.0


def bench(
    name: ModelName,
    seconds: Annotated[
        float,
        typer.Option(min=0.1, max=600, help="Seconds for each number of concurrent requests."),
    ] = 5,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=4096,
            help="Concurrent requests; repeatable. Default: 1, 8 and the planned number.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the speed of a served model. Later plans use the result.

    The steps are long prompts, a single answer, and concurrent answers.

    Prompts are random and answers have one length. Beside other requests the numbers are shown,
    but plans do not use them.
    """
    import asyncio

    from gateway.domain import BenchReport
    from gateway.measuring.bench.measure import LoadTest

    view = call("GET", model_path(name))
    if view["state"] != "ready":
        raise NotReady(
            f"{name} is not ready: {status_text(view)}.",
            hint=f"`fitserve show {name}` shows the details.",
        )
    plan = view["plan"]
    target, context = _target(name, plan)
    load = LoadTest(
        target, context, lambda step: None if as_json else say(f"{name}: {step}", is_error=True)
    )
    planned_concurrency = _planned_concurrency(plan, view) if plan else 32
    count_before = _count_requests()
    report = asyncio.run(
        load.measure(
            sorted(set(concurrency or (1, min(8, planned_concurrency), planned_concurrency))),
            seconds,
        )
    )
    other_requests = _describe_other_requests(count_before, load.request_count)
    fields = report.model_dump() | {"disturbed": other_requests, "fingerprint": _plan_digest(view)}
    stored_bench = call(
        "POST",
        model_path(name, "/bench"),
        BenchReport.model_validate(fields).model_dump(mode="json"),
    )
    expected_speed = plan["speed"] if plan else None
    if as_json:
        say(json.dumps({**stored_bench, "expected": expected_speed}, indent=2))
    else:
        _show_bench(stored_bench, expected_speed)


def _target(name: str, plan: Any) -> tuple[Any, int]:
    """The target of the load, and the context of its requests. Raises NotReady."""
    from gateway.measuring.bench.streamed_answer import BenchTarget

    if plan is not None and plan["model"]["task"] != "generate":
        raise NotReady(
            f"{name} generates no text, so there is nothing to measure.",
            hint="Measure a model that generates text.",
        )
    url, key = address()
    vocabulary = plan["model"]["vocab"] if plan else 20_000
    context = plan["max_model_len"]["value"] if plan else 4096
    return BenchTarget(url, name, key, vocabulary), context


def _planned_concurrency(plan: Any, view: Any) -> int:
    """Concurrent requests of the plan, at most as many as its engines accept."""
    if plan["speed"]:
        return int(plan["speed"]["concurrency"])
    max_requests = plan["max_num_seqs"]["value"] * max(1, len(view["replicas"]))
    return int(min(view["wish"]["concurrency"] or 32, max_requests))


def _plan_digest(view: Any) -> str | None:
    ready_attempts = [
        replica["attempt"] for replica in view["replicas"] if replica["state"] == "ready"
    ]
    return next(
        (attempt["fingerprint"] for attempt in view["attempts"] if attempt["id"] in ready_attempts),
        None,
    )


def _count_requests() -> int:
    """The number of requests that the gateway has answered."""
    return round(math.fsum(map(float, _ENDED_REQUESTS.findall(get_text("/metrics")))))


def _describe_other_requests(count_before: int, own_count: int) -> str:
    """A sentence about requests from other clients during the measurement, or an empty string."""
    import time

    deadline = time.monotonic() + _REPORT_TIMEOUT_S
    while (count := _count_requests() - count_before) < own_count and time.monotonic() < deadline:
        time.sleep(0.1)
    running_requests = re.findall(
        r'^fitserve_requests_in_flight\{model="[^"]+"\} ([1-9]\S*)$',
        get_text("/metrics"),
        re.MULTILINE,
    )
    if count == own_count and not running_requests:
        return ""
    return (
        f"{max(0, count - own_count)} other requests ended during the measurement, and"
        f" {round(math.fsum(map(float, running_requests)))} are still running"
    )


def _show_bench(stored_bench: Any, expected_speed: Any) -> None:
    """Print a measurement next to the forecast and the previous measurement."""
    bench = stored_bench["bench"]
    last = stored_bench["last"] or {}
    print_paragraph(
        f"{bench['model']}: prompts of {bench['prompt']:,} tokens, answers of {bench['answer']:,},"
        f" {bench['engine'] or 'an endpoint'}"
    )
    rows: list[tuple[object, ...]] = []

    def add_row(
        title: str, unit: str, value: float | None, planned_value: Any, last_value: float | None
    ) -> None:
        if value is not None:
            forecast = f"{planned_value['value']:,g}" if planned_value else "-"
            error = f"{100 * (value / planned_value['value'] - 1):+.0f} %" if planned_value else "-"
            last_text = f"{last_value:,.4g}" if last_value else "-"
            rows.append((title, f"{value:,.4g} {unit}", forecast, error, last_text))

    forecasts = _forecast(expected_speed) if expected_speed else {}
    for title, unit, name in (
        ("first token, 2k", "s", "first_token_2k_s"),
        ("first token, 32k", "s", "first_token_32k_s"),
        ("one request", "tokens/s", "stream"),
    ):
        add_row(title, unit, bench[name], forecasts.get(name), last.get(name))
    former_speeds = {
        level["concurrency"]: level["tokens_per_s"] for level in last.get("levels", ())
    }
    for level in bench["levels"]:
        count = level["concurrency"]
        forecast = forecasts.get("total") if forecasts.get("concurrency") == count else None
        add_row(
            f"{count:,} concurrent",
            "tokens/s",
            level["tokens_per_s"],
            forecast,
            former_speeds.get(count),
        )
    print_table(("", "NOW", "EXPECTED", "OFF", "LAST"), rows)
    say("")
    latencies = [
        (f"{level['concurrency']:,}", level["requests"], *_duration_cells(level))
        for level in bench["levels"]
    ]
    print_table(
        ("CONCURRENT", "REQUESTS", "LATENCY P50", "P95", "FIRST TOKEN P50", "P95"), latencies
    )
    if stored_bench["not_learned"]:
        print_paragraph(f"\nPlans do not use this result: {stored_bench['not_learned']}.")
    if rival := stored_bench["rival"]:
        say("")
        print_paragraph(f"Another plan should be better. {rival['words']} {rival['command']}")


def _forecast(speed: Any) -> Any:
    """The forecast without the corrections of earlier measurements."""
    if speed["grade"] != "measured":
        return speed
    values = {
        name: {"value": float(f"{speed[name]['value'] / ratio:.3g}")}
        for name, ratio in speed["ratios"].items()
        if speed[name]
    }
    return {"concurrency": speed["concurrency"], **values}


def _duration_cells(level: Any) -> list[str]:
    names = ("latency_p50_s", "latency_p95_s", "first_token_p50_s", "first_token_p95_s")
    return [f"{level[name]:.3g} s" for name in names]
