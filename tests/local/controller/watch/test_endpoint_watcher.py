"""Endpoints that answer anything but the question: the gateway says so in the model's state, and
nothing else of it notices."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.controller.watch.endpoint_watcher import EndpointKey, EndpointWatcher
from gateway.controller.watch.engine_client import EngineClient, NoAnswerError
from gateway.domain import LaunchSpec
from gateway.proxy.access.endpoint_keys import EndpointKeys
from gateway.proxy.routing.model_route import RoutedReplica
from gateway.secret import Secret
from tests.support.dataplane import never_answers, refused_url, until
from tests.support.log_lines import capture_logs
from tests.support.patience import HANG_S, hang_s
from tests.support.running import Running, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

Script = Callable[[Call], Awaitable[None]]
MIB = 1024 * 1024
NO_KEY = EndpointKey(EndpointKeys(Path("/nowhere")), None)


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


def replies(
    body: bytes, headers: str = "content-type: application/json\r\n", status: str = "200 OK"
) -> Script:
    return lambda call: call.reply(body, status, headers)


def models(*names: Any) -> Script:
    return replies(
        json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode()
    )


async def closes(call: Call) -> None:
    call.close()


async def flood(call: Call) -> None:
    await call.start("application/json")
    while not call.closed.is_set():
        await call.chunk(b" " * 65536)


HOSTILE: dict[str, tuple[Script, str]] = {
    "brackets": (replies(b"[" * 200_000), "unexpected answer"),
    "hidden brackets": (replies(b'{"data": [], "x": ' + b'{"a":' * 100_000), "unexpected answer"),
    "a bomb": (replies(gzip.compress(b" " * 50 * MIB), "content-encoding: gzip\r\n"), "encodes"),
    "a flood": (flood, "more than"),
    "no models": (models(), "does not serve"),
    "other models": (models("x", "y"), "does not serve alias but x, y"),
    "a lone surrogate": (models("\ud800"), "unexpected answer"),
    "a name for terminals": (models("\x1b[31mred"), "does not serve"),
    "an empty name": (models(""), "does not serve"),
    "a very long name": (models("x" * 100_000), "does not serve"),
    "very many names": (models(*range(1000)), "unexpected answer"),
    "a number as a name": (models(7), "unexpected answer"),
    "null": (replies(b"null"), "unexpected answer"),
    "null in it": (replies(b'{"data": null}'), "unexpected answer"),
    "no JSON": (replies(b"<html>"), "unexpected answer"),
    "a locked door": (replies(b"{}", status="401 Unauthorized"), "answers 401: it needs a key"),
    "an error": (replies(b"{}", status="500 Oh"), "answers 500"),
    "a redirect": (replies(b"", "location: http://127.0.0.1:1/\r\n", "302 Found"), "answers 302"),
    "no HTTP": (lambda call: call.send(b"\xff" * 100), "does not speak HTTP"),
    "a short life": (closes, "closes"),
}


async def check_and_rest(watcher: EndpointWatcher) -> float:
    """Checks the endpoint once by hand. Returns the seconds that the watcher would rest then."""
    return await watcher._check_endpoint()


async def wait_until_detail_has(gateway: Running, name: str, words: str) -> None:
    """Returns when the state of the model says so."""
    async with asyncio.timeout(hang_s()):
        while words not in (await gateway.show(name))["detail"]:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("case", HOSTILE)
async def test_an_endpoint_that_answers_nonsense_hurts_nobody(tmp_path: Path, case: str) -> None:
    script, words = HOSTILE[case]
    with capture_logs() as logs:
        async with (
            running(tmp_path, healthy) as gateway,
            Upstream(script) as bad,
            Upstream(models("good")) as good,
        ):
            for name, endpoint in (("alias", bad.url), ("good", good.url)):
                response = await gateway.client.post(
                    "/admin/models", json={"name": name, "endpoint": endpoint}
                )
                assert response.status_code == 202, response.text
            await wait_until_detail_has(gateway, "alias", words)
            await gateway.until("good", "ready")
            # It is asked again and again, and every page that tells of it can be read.
            count = len(bad.calls)
            await until(lambda: len(bad.calls) > count + 2)
            for path in ("/healthz", "/readyz", "/metrics", "/admin/models", "/v1/models"):
                answer = await gateway.client.get(path)
                assert answer.status_code == 200, (path, answer.text)
                assert answer.text.encode()
            reply = await gateway.client.post(
                "/v1/completions", json={"model": "alias", "prompt": "hi"}
            )
            assert reply.status_code == 503
            view = await gateway.show("alias")
            assert view["state"] == "unreachable"
            assert view["detail"].isprintable()
            assert len(view["detail"]) < 4000
            assert (await gateway.client.delete("/admin/models/alias")).status_code == 202
            await gateway.wait_until_gone("alias")
            await gateway.until("good", "ready")
    assert "unexpected error" not in {event["event"] for event in logs}


async def test_an_endpoint_that_says_nothing_keeps_no_other_from_being_asked(
    tmp_path: Path,
) -> None:
    async with (
        running(tmp_path, healthy) as gateway,
        Upstream(never_answers) as silent,
        Upstream(models("x")) as good,
    ):
        urls = [f"{silent.url}/{index}" for index in range(63)]
        await gateway.client.post(
            "/admin/models", json={"name": "m", "endpoints": [*urls, good.url]}
        )
        await gateway.until("m", "ready")
        assert "1 of 64 endpoints answer" in (await gateway.show("m"))["detail"]
        assert (await gateway.client.delete("/admin/models/m")).status_code == 202
        await gateway.wait_until_gone("m")


async def test_changed_endpoints_are_asked(tmp_path: Path) -> None:
    async with (
        running(tmp_path, healthy) as gateway,
        Upstream(models("x")) as upstream,
        Upstream(never_answers) as endpoint,
    ):
        await gateway.client.post("/admin/models", json={"name": "m", "endpoints": [upstream.url]})
        await gateway.until("m", "ready")
        for endpoints, detail in (
            ([endpoint.url], f"{endpoint.url} was not checked yet"),
            ([endpoint.url, upstream.url], "1 of 2 endpoints answer"),
            ([upstream.url], "1 of 1 endpoints answer"),
        ):
            answer = await gateway.client.patch("/admin/models/m", json={"endpoints": endpoints})
            assert answer.status_code == 200, answer.text
            await wait_until_detail_has(gateway, "m", detail)


async def test_an_error_in_a_watcher_is_shown_stays_there_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_broken = True
    real = EndpointWatcher._query

    async def ask(self: EndpointWatcher) -> tuple[RoutedReplica | None, str, str]:
        if is_broken and self.url.endswith("/bad"):
            raise RuntimeError("nobody expected \ud800 this")
        return await real(self)

    monkeypatch.setattr(EndpointWatcher, "_query", ask)
    monkeypatch.setattr("gateway.supervision.FIRST_REST_S", 0.1)
    async with running(tmp_path, healthy) as gateway, Upstream(models("x")) as good:
        await gateway.client.post(
            "/admin/models", json={"name": "bad", "endpoint": f"{good.url}/bad"}
        )
        await gateway.client.post(
            "/admin/models", json={"name": "both", "endpoints": [f"{good.url}/bad", good.url]}
        )
        await wait_until_detail_has(gateway, "bad", "internal error: RuntimeError: nobody expected")
        await wait_until_detail_has(gateway, "both", "1 of 2 endpoints answer; ")
        # Before its error the other one was not checked yet.
        await wait_until_detail_has(gateway, "both", "internal error")
        assert (await gateway.client.get("/readyz")).status_code == 200
        with capture_logs() as logs:
            await until(
                lambda: any(isinstance(event.get("exc_info"), RuntimeError) for event in logs)
            )
        is_broken = False
        await gateway.until("bad", "ready")
        is_broken = True
        assert (await gateway.client.delete("/admin/models/bad")).status_code == 202
        await gateway.wait_until_gone("bad")


async def test_an_endpoint_that_stays_away_is_asked_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)
    stretch = 1.0
    watcher = EndpointWatcher(
        "m", f"{refused_url()}/v1", EngineClient(1), 5.0, lambda: stretch, lambda: None, NO_KEY
    )
    await watcher.close()  # it is asked by hand
    assert [await check_and_rest(watcher) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    async with Upstream(models("m")) as engine:
        watcher.url = engine.url
        assert await check_and_rest(watcher) == 5
        stretch = 3.0
        assert await check_and_rest(watcher) == 15
    assert await check_and_rest(watcher) == 1


async def test_pauses_between_questions_differ() -> None:
    watcher = EndpointWatcher(
        "m", f"{refused_url()}/v1", EngineClient(1), 5.0, lambda: 1.0, lambda: None, NO_KEY
    )
    await watcher.close()
    assert len({await check_and_rest(watcher) for _ in range(20)}) == 20


async def test_a_stored_endpoint_that_is_no_url_is_shown_and_asked_nothing() -> None:
    """As an older version may have stored it."""
    for url in ("http://h:x/v1", "http://[::1/v1", "http://127.0.0.1:9/\ud800", "", "http:///v1"):
        watcher = EndpointWatcher("m", url, EngineClient(1), 5.0, lambda: 1.0, lambda: None, NO_KEY)
        try:
            await check_and_rest(watcher)
            assert watcher.replica is None
            assert "not a URL" in watcher.detail or "does not answer" in watcher.detail
        finally:
            await watcher.close()
    with pytest.raises(NoAnswerError):
        await EngineClient(1).get("/v1/models", HANG_S)


def another_gateway(state: Any, wait_s: Any = 0, refusal: bytes = b"") -> Script:
    """Has one model in that state, and answers inference with 503 where there is a refusal."""

    async def script(call: Call) -> None:
        if call.head[0].startswith(b"GET"):
            model_row = {"id": "m", "owned_by": "fitserve", "state": state, "wait_s": wait_s}
            await call.reply(json.dumps({"object": "list", "data": [model_row]}).encode())
        elif refusal:
            await call.reply(
                refusal,
                "503 Service Unavailable",
                "content-type: application/json\r\nretry-after: 7\r\n",
            )
        else:
            await call.reply(b'{"choices": [{"text": "hello"}]}')

    return script


@pytest.mark.parametrize(
    ("state", "wait_s", "shown_state"),
    [
        ("ready", 0, "ready"),
        ("asleep", 600, "asleep"),
        ("starting", 0, "starting"),
        ("no_plan", 600, "asleep"),
        ("stopped", 600, "asleep"),
        ("backing_off", 0, "backing_off"),
        ("no_plan", 0, "unreachable"),
        ("quarantined", 0, "unreachable"),
        ("unreachable", 0, "unreachable"),
        ("stopped", 0, "unreachable"),
        ("a state of tomorrow", 0, "ready"),
        (["x"], {}, "ready"),
    ],
)
async def test_a_model_of_another_gateway_is_asked_where_it_answers_or_comes(
    tmp_path: Path, state: Any, wait_s: Any, shown_state: str
) -> None:
    async with (
        running(tmp_path, healthy) as gateway,
        Upstream(another_gateway(state, wait_s)) as rear,
    ):
        await gateway.client.post("/admin/models", json={"name": "m", "endpoint": rear.url})
        await gateway.until("m", shown_state)
        if shown_state == "unreachable":
            await wait_until_detail_has(gateway, "m", f"{rear.url} has m, which is {state} there")
        view = await gateway.show("m")
        answer = await gateway.client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
        if shown_state == "unreachable":
            assert view["detail"] == f"{rear.url} has m, which is {state} there"
            assert answer.status_code == 503
            assert view["detail"] in answer.text
        else:
            assert answer.status_code == 200
            details = {"ready": "", "asleep": "; the next request loads it there"}
            # Before it was asked it is starting too.
            detail = details.get(shown_state, f"; it is {shown_state.replace('_', ' ')} there")
            await wait_until_detail_has(gateway, "m", f"1 of 1 endpoints answer{detail}")
        models = (await gateway.client.get("/v1/models")).json()["data"]
        assert [model_row["state"] for model_row in models] == [shown_state]


async def test_a_model_that_sleeps_there_is_asked_only_where_none_is_ready(tmp_path: Path) -> None:
    async with (
        running(tmp_path, healthy) as gateway,
        Upstream(another_gateway("asleep", 600)) as sleeps,
        Upstream(another_gateway("ready")) as serves,
    ):

        def count_questions(upstream: Upstream) -> int:
            return sum(request.startswith(b"POST") for request in upstream.requests)

        await gateway.client.post(
            "/admin/models", json={"name": "m", "endpoints": [sleeps.url, serves.url]}
        )
        await wait_until_detail_has(gateway, "m", "2 of 2 endpoints answer")
        assert (await gateway.show("m"))["state"] == "ready"
        for _ in range(10):
            assert (
                await gateway.client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
            ).status_code == 200
        assert (count_questions(sleeps), count_questions(serves)) == (0, 10)
        await gateway.client.patch("/admin/models/m", json={"endpoints": [sleeps.url]})
        await gateway.until("m", "asleep")
        assert (
            await gateway.client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
        ).status_code == 200
        assert (count_questions(sleeps), count_questions(serves)) == (1, 10)


async def test_a_refusal_of_another_gateway_comes_through_whole(tmp_path: Path) -> None:
    refusal = (
        b'{"error":{"message":"The model m cannot answer now, it is starting: weights 12 of 40'
        b' GiB.","type":"api_error","param":"model","code":"model_not_ready"}}'
    )
    async with (
        running(tmp_path, healthy) as gateway,
        Upstream(another_gateway("starting", 0, refusal)) as rear,
    ):
        await gateway.client.post("/admin/models", json={"name": "m", "endpoint": rear.url})
        await gateway.until("m", "starting")
        for body in (
            {"model": "m", "prompt": "hi"},
            {"model": "m", "prompt": "hi", "stream": True},
        ):
            answer = await gateway.client.post(
                "/v1/completions",
                json=body,
                headers={"x-request-id": "mine", "traceparent": "00-a"},
            )
            assert (answer.status_code, answer.headers["retry-after"], answer.content) == (
                503,
                "7",
                refusal,
            )
            assert answer.headers["x-request-id"] == "mine"
            # The watcher asks for the models meanwhile.
            request = [request for request in rear.requests if request.startswith(b"POST")][-1]
            assert b"\r\nx-request-id: mine\r\n" in request
            assert b"\r\ntraceparent: 00-a\r\n" in request


async def test_a_gateway_that_is_its_own_endpoint_ends_its_requests(tmp_path: Path) -> None:
    async with running(tmp_path / "a", healthy, access_log=True) as gateway:
        await gateway.client.post(
            "/admin/models", json={"name": "m", "endpoint": f"{gateway.url}/v1"}
        )
        await wait_until_detail_has(gateway, "m", "it is starting there")
        for _ in range(3):
            answer = await gateway.client.post(
                "/v1/completions", json={"model": "m", "prompt": "hi"}, headers={"via": "1.1 proxy"}
            )
            assert answer.status_code == 508, answer.text
            assert answer.json()["error"]["code"] == "loop_detected"
            assert "endpoints of m" in answer.json()["error"]["message"]
        metrics = (await gateway.client.get("/metrics")).text
        # Each was asked once by its client, and four times by the gateway itself.
        count = sum(
            float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith("fitserve_requests_total{")
        )
        assert count == 3 * 5


class HangingKeys(EndpointKeys):
    """Keys on a mount that does not answer."""

    def read(self, reference: str) -> Secret:
        del reference
        FREE.wait()
        return Secret("key")


FREE = threading.Event()


async def test_keys_on_a_mount_that_hangs_stop_nothing_else() -> None:
    """More watchers than the loop has threads for files wait, and other threads go on."""
    client = EngineClient(4)
    watchers = [
        EndpointWatcher(
            "m",
            f"{refused_url()}/v1",
            client,
            0.01,
            lambda: 1.0,
            lambda: None,
            EndpointKey(HangingKeys(Path("/nowhere")), "file:a", 0.01),
        )
        for _ in range(64)
    ]
    try:
        await until(
            lambda: all(
                "no answer of the file system" in each_watcher.detail for each_watcher in watchers
            )
        )
        async with asyncio.timeout(hang_s()):
            assert await asyncio.to_thread(lambda: 1) == 1
    finally:
        FREE.set()
        for watcher in watchers:
            await watcher.close()
