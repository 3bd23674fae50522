"""Metrics: one table of names, counted as clients and engines behave, with labels that no client
can choose."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from gateway.proxy.metrics.counters import METRICS, Metrics, render
from tests.support.dataplane import (
    ASK,
    CHAT,
    Gateway,
    event,
    http_client,
    model,
    refused_url,
    stage,
    until,
)
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call

USAGE = {"prompt_tokens": 30, "completion_tokens": 20, "total_tokens": 50}
_LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)+)\})? (\S+)')


def values(text: str) -> dict[tuple[str, ...], float]:
    """The samples, as a reader of the text format sees them: (name, values of labels...) ->
    value."""
    values_by_label: dict[tuple[str, ...], float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        assert match, line
        labels = re.findall(r'="((?:[^"\\]|\\.)*)"', match[2] or "")
        key = (match[1], *labels)
        assert key not in values_by_label, line
        values_by_label[key] = float(match[3])
    return values_by_label


# --- over sockets ---


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway(meter=Metrics()) as server:
        yield server


@asynccontextmanager
async def count_changes(gateway: Gateway) -> AsyncIterator[Any]:
    """A function that gives the counts since then."""
    meter = gateway.plane.meter
    assert isinstance(meter, Metrics)
    values_before = values(render(meter.samples()))

    def since(*key: str) -> float:
        gateway.catch_up()
        return values(render(meter.samples())).get(key, 0) - values_before.get(key, 0)

    yield since


# The gateway's clock goes by milliseconds: an engine that thinks for less has answered at once.
THINKS_S = 0.01


async def count_requests(call: Call) -> None:
    await asyncio.sleep(THINKS_S)
    await call.reply(json.dumps({"id": "c1", "choices": [], "usage": USAGE}).encode())


async def streams(call: Call) -> None:
    await asyncio.sleep(THINKS_S)
    await call.start()
    for number in range(5):
        await call.chunk(event(f"token {number}"))
    await call.chunk(
        b"data: " + json.dumps({"id": "c1", "choices": [], "usage": USAGE}).encode() + b"\n\n"
    )
    await call.chunk(b"data: [DONE]\n\n")
    await call.end()


async def no_memory(call: Call) -> None:
    await call.reply(b"{}", status="500 Internal Server Error")


async def dies_early(call: Call) -> None:
    call.close()


async def dies_late(call: Call) -> None:
    await call.start()
    await call.chunk(event("first"))
    call.close()


async def ends_early(call: Call) -> None:
    await call.start()
    await call.chunk(event("first"))
    await call.end()


async def breaks_inside(call: Call) -> None:
    await call.start()
    await call.chunk(event("first"))
    await call.chunk(b'data: {"error": {"message": "pop from empty list", "code": 500}}\n\n')
    await call.chunk(b"data: [DONE]\n\n")
    await call.end()


async def refuses_inside(call: Call) -> None:
    await call.start()
    await call.chunk(b'data: {"error": {"message": "too long", "code": 400}}\n\n')
    await call.chunk(b"data: [DONE]\n\n")
    await call.end()


async def waits(call: Call) -> None:
    await call.closed.wait()


async def hangs_late(call: Call) -> None:
    await call.start()
    await call.chunk(event("first"))
    await call.closed.wait()


@pytest.mark.anyio
async def test_a_stream_without_its_end_is_an_error_and_broken(gateway: Gateway) -> None:
    async with (
        stage(gateway, ends_early) as [upstream],
        count_changes(gateway) as since,
        http_client(gateway) as client,
    ):
        text = (await client.post(CHAT, json={**ASK, "stream": True})).text
        assert text.startswith(event("first").decode())
        assert json.loads(text.split("data: ")[-1])["error"]["code"] == "engine_error"
        assert "[DONE]" not in text
        assert since("fitserve_requests_total", "m", "chat", "broken", "2xx") == 1
        assert since("fitserve_upstream_errors_total", "m", "broken") == 1
        assert since("fitserve_requests_total", "m", "chat", "answered", "2xx") == 0
        assert len(upstream.requests) == 1  # a part of the answer was sent: no second try


@pytest.mark.anyio
async def test_an_error_event_passes_and_counts_as_an_error(gateway: Gateway) -> None:
    stream_body = {**ASK, "stream": True}
    async with count_changes(gateway) as since, http_client(gateway) as client:
        async with stage(gateway, breaks_inside):
            text = (await client.post(CHAT, json=stream_body)).text
        assert text.count('"error"') == 1
        assert text.endswith("data: [DONE]\n\n")
        assert since("fitserve_requests_total", "m", "chat", "broken", "2xx") == 1
        assert since("fitserve_upstream_errors_total", "m", "broken") == 1
        async with stage(gateway, refuses_inside):
            text = (await client.post(CHAT, json=stream_body)).text
        assert "too long" in text
        assert since("fitserve_requests_total", "m", "chat", "answered", "4xx") == 1
        assert since("fitserve_upstream_errors_total", "m", "broken") == 1


@pytest.mark.anyio
@pytest.mark.parametrize("script", [count_requests, streams])
async def test_an_answer_is_counted_with_its_tokens(gateway: Gateway, script: Any) -> None:
    async with (
        stage(gateway, script),
        count_changes(gateway) as since,
        http_client(gateway) as client,
    ):
        for _ in range(3):
            assert (await client.post(CHAT, json=ASK)).status_code == 200
        assert since("fitserve_requests_total", "m", "chat", "answered", "2xx") == 3
        assert since("fitserve_tokens_total", "m", "prompt") == 90
        assert since("fitserve_tokens_total", "m", "completion") == 60
        assert since("fitserve_request_duration_seconds_count", "m", "chat") == 3
        assert since("fitserve_request_duration_seconds_bucket", "m", "chat", "+Inf") == 3
        assert since("fitserve_first_byte_seconds_count", "m", "chat") == 3
        assert (
            0
            < since("fitserve_first_byte_seconds_sum", "m", "chat")
            <= since("fitserve_request_duration_seconds_sum", "m", "chat")
        )


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("script", "outcome", "status", "kind"),
    [
        (no_memory, "answered", "5xx", "5xx"),
        (dies_early, "refused", "5xx", "engine_error"),
        (dies_late, "broken", "2xx", "broken"),
    ],
)
async def test_failures_of_engines_are_told_apart(
    gateway: Gateway, script: Any, outcome: str, status: str, kind: str
) -> None:
    async with (
        stage(gateway, script),
        count_changes(gateway) as since,
        http_client(gateway) as client,
    ):
        await client.post(CHAT, json={**ASK, "stream": True})
        assert since("fitserve_requests_total", "m", "chat", outcome, status) == 1
        assert since("fitserve_upstream_errors_total", "m", kind) == 1
        assert since("fitserve_requests_in_flight", "m") == 0


@pytest.mark.anyio
async def test_a_refused_connection_of_an_engine_is_counted(gateway: Gateway) -> None:
    gateway.route(model(refused_url()))
    async with count_changes(gateway) as since, http_client(gateway) as client:
        assert (await client.post(CHAT, json=ASK)).status_code == 502
        assert since("fitserve_upstream_errors_total", "m", "unreachable") == 1
        assert since("fitserve_refusals_total", "engine_unreachable") == 1
        assert since("fitserve_requests_total", "m", "chat", "refused", "5xx") == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("script", "phase", "status"), [(waits, "waiting", "none"), (hangs_late, "answering", "2xx")]
)
async def test_clients_that_leave_lower_the_gauge(
    gateway: Gateway, script: Any, phase: str, status: str
) -> None:
    async with stage(gateway, script), count_changes(gateway) as since:
        async with http_client(gateway) as client:
            leaving = asyncio.create_task(client.post(CHAT, json={**ASK, "stream": True}))
            await until(lambda: since("fitserve_requests_in_flight", "m") == 1)
            await until(
                lambda: (
                    since("fitserve_first_byte_seconds_count", "m", "chat")
                    == (script is hangs_late)
                )
            )
            leaving.cancel()
        await until(lambda: since("fitserve_client_disconnects_total", "m", phase) == 1)
        assert since("fitserve_requests_total", "m", "chat", "left", status) == 1
        assert since("fitserve_requests_in_flight", "m") == 0


@pytest.mark.anyio
async def test_a_client_that_leaves_while_waiting_for_a_replica_is_counted(
    gateway: Gateway,
) -> None:
    async with stage(gateway, waits) as [upstream], count_changes(gateway) as since:
        replica = replace(model(upstream.url).replicas[0], capacity=1)
        gateway.route(replace(model(upstream.url), replicas=(replica,)))
        async with http_client(gateway) as client:
            first_task = asyncio.create_task(client.post(CHAT, json=ASK))
            await until(lambda: bool(upstream.requests))
            second = asyncio.create_task(client.post(CHAT, json=ASK))
            await until(lambda: gateway.routes.waiting("m") == 1)
            assert since("fitserve_requests_in_flight", "m") == 1
            second.cancel()
            await until(lambda: gateway.routes.waiting("m") == 0)
            assert since("fitserve_client_disconnects_total", "m", "waiting") == 1
            first_task.cancel()
            await asyncio.gather(first_task, second, return_exceptions=True)
        await until(lambda: since("fitserve_client_disconnects_total", "m", "waiting") == 2)
        assert since("fitserve_requests_total", "m", "chat", "left", "none") == 2
        assert since("fitserve_requests_in_flight", "m") == 0


@pytest.mark.anyio
async def test_names_that_clients_make_up_are_no_labels(gateway: Gateway) -> None:
    async with (
        stage(gateway, count_requests),
        count_changes(gateway) as since,
        http_client(gateway) as client,
    ):
        for number in range(20):
            assert (
                await client.post(CHAT, json={**ASK, "model": f"made-up-{number}"})
            ).status_code == 404
        await client.post(CHAT, content=b"{")
        await client.get("/v1/made-up")
        assert since("fitserve_requests_total", "", "chat", "refused", "4xx") == 21
        assert since("fitserve_refusals_total", "model_not_found") == 20
        assert since("fitserve_refusals_total", "not_found") == 1
    assert isinstance(gateway.plane.meter, Metrics)
    assert "made-up" not in render(gateway.plane.meter.samples())


@pytest.mark.anyio
async def test_the_context_of_a_trace_is_passed_on(gateway: Gateway) -> None:
    context = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
    }
    async with stage(gateway, count_requests) as [upstream], http_client(gateway) as client:
        await client.post(CHAT, json=ASK, headers={**context, "baggage": "user=1"})
        headers = upstream.calls[-1].headers
        assert {name: headers[name] for name in context} == context
        assert "baggage" not in headers


# --- the whole gateway ---


def engine(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


def dies(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model, gibberish=True)


async def scrape(gateway: Running) -> dict[tuple[str, ...], float]:
    answer = await gateway.client.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = {line.split()[2] for line in answer.text.splitlines() if line.startswith("# TYPE")}
    assert names == {metric.name for metric in METRICS}
    return values(answer.text)


@pytest.mark.anyio
async def test_metrics_show_the_state_of_models_and_replicas(tmp_path: Path) -> None:
    began = time.monotonic()
    async with running(tmp_path, engine) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        assert (await gateway.client.post(CHAT, json=ASK)).status_code == 200
        page = await scrape(gateway)
        lifetime_s = time.monotonic() - began
    assert page["fitserve_models", "ready"] == 1
    assert page["fitserve_replicas", "m", "ready"] == 1
    assert page["fitserve_requests_queued", "m"] == 0
    assert page["fitserve_attempts_total", "m"] == 1
    assert page["fitserve_requests_total", "m", "chat", "answered", "2xx"] == 1
    assert page["fitserve_connections",] == 1
    assert 0 <= page["fitserve_loop_age_seconds",] < lifetime_s
    assert page["process_cpu_seconds_total",] > 0
    assert page["process_resident_memory_bytes",] > 2**20
    assert 3 < page["process_open_fds",] <= page["process_max_fds",]
    assert [key for key in page if key[0] == "fitserve_build_info"]
    # An event that never happened has no samples.
    assert not [key for key in page if key[0] == "fitserve_failures_total"]


@pytest.mark.anyio
async def test_failed_starts_are_counted_by_their_failure(tmp_path: Path) -> None:
    async with running(tmp_path, dies) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), policy={"max_attempts": 1})
        await gateway.until("m", "quarantined")
        first = await scrape(gateway)
        second = await scrape(gateway)
    for view in (first, second):
        assert (
            view["fitserve_attempts_total", "m"]
            == view["fitserve_failures_total", "m", "gibberish"]
            >= 1
        )
        assert view["fitserve_facts", "plan_failed"] >= 1
        assert view["fitserve_models", "quarantined"] == 1
    assert first["fitserve_attempts_total", "m"] == second["fitserve_attempts_total", "m"]


@pytest.mark.anyio
async def test_the_access_log_tells_callers_and_paths_but_no_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, engine, access_log=True, admin_key="canary-of-the-key") as gateway:
        gateway.client.headers["authorization"] = "Bearer canary-of-the-key"
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        words = [{"role": "user", "content": "canary-of-the-prompt"}]
        await gateway.client.post(
            CHAT, json={"model": "m", "messages": words}, headers={"x-request-id": "mine"}
        )
        await gateway.client.post(CHAT, json={"model": "x", "messages": words})
        await gateway.client.post(
            CHAT, json={"model": "m"}, headers={"authorization": "Bearer canary-of-a-wrong-key"}
        )
    output = capfd.readouterr().err
    lines = [json.loads(line) for line in output.splitlines() if '"event":"request"' in line]
    assert [(line["status"], line["outcome"]) for line in lines] == [
        (200, "answered"),
        (404, "refused"),
        (401, "refused"),
    ]
    good = lines[0]
    assert (good["id"], good["key"], good["endpoint"], good["model"]) == (
        "mine",
        "admin",
        "chat",
        "m",
    )
    assert good["address"] == "127.0.0.1"
    assert 0 < good["first_byte_s"] <= good["duration_s"]
    assert good["sent_bytes"] > 0
    assert [line["code"] for line in lines[1:]] == ["model_not_found", "invalid_api_key"]
    assert "canary" not in output
