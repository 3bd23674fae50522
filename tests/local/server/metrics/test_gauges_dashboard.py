"""Every series of the dashboard and the alert rules comes from a gateway that works: with engines
that answer, fail and leave, and GPUs that fail."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest

from gateway.domain import LaunchSpec
from tests.local.server.metrics.test_engine_series import COUNTS
from tests.support.dashboard import NAME, OTHERS, expressions
from tests.support.fake_nvml import two_3090
from tests.support.makers import LLAMA_8B, machine
from tests.support.patience import hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def telling(spec: LaunchSpec, starts: list[str], hold: Path) -> EngineScript:
    """The first start fails."""
    starts.append(spec.name)
    if len(starts) == 1:
        return EngineScript(model=spec.model, serve=False, exit_code=1)
    counts = tuple((f"vllm:{name}", value) for name, value in COUNTS.items())
    counts += (("vllm:request_queue_time_seconds_sum", 0.1),)
    return EngineScript(model=spec.model, counts=counts, hold=hold)


async def add_broken_engine(call: Call) -> None:
    """An engine that runs elsewhere, and answers no request."""
    body = b'{"object":"list","data":[{"id":"e","object":"model"}]}'
    await (call.reply(body) if call.head[0].startswith(b"GET") else call.reply(b"{}", "500 Broken"))


async def shown_panels(gateway: Running) -> set[str]:
    lines = (await gateway.client.get("/metrics")).text.splitlines()
    return {line.partition("{")[0].partition(" ")[0] for line in lines if line[:1] != "#"}


async def leave(gateway: Running) -> None:
    """As a client that goes in the middle of its answer."""
    async with gateway.client.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
    ) as answer:
        await anext(answer.aiter_bytes())


async def test_every_series_that_is_asked_for_is_exposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.server.metrics.engine_series._READ_S", 0.05)
    monkeypatch.setattr("gateway.machine.gpu_watch._POLL_S", 0.02)
    names = {
        name for expression in expressions() for name, _ in NAME.findall(expression)
    } - OTHERS.keys()
    nvml, exposed_names, hold = two_3090(), set[str](), tmp_path / "hold"
    nvml.cards[0].throttles = 0x40

    async def wait_until_seen(exceptions: set[str]) -> None:
        deadline = time.monotonic() + hang_s()
        while missing := names - exceptions - exposed_names:
            assert time.monotonic() < deadline, f"never shown: {sorted(missing)}"
            exposed_names.update(await shown_panels(gateway))
            await asyncio.sleep(0.05)

    ends = {"fitserve_gpu_lost", "fitserve_unloads_total"}
    async with (
        Upstream(add_broken_engine) as foreign_upstream,
        running(
            tmp_path, partial(telling, starts=[], hold=hold), hardware=machine("2x3090"), nvml=nvml
        ) as gateway,
    ):
        await gateway.client.post(
            "/admin/models", json={"name": "e", "endpoint": f"{foreign_upstream.url}/v1"}
        )
        await gateway.add(
            "m", model_folder(tmp_path / "model", **LLAMA_8B), engines=["vllm==0.26.0"], gpus=1
        )
        await gateway.until("e", "ready")
        await gateway.until("m", "ready")
        assert (await gateway.client.post("/v1/chat/completions", json=CHAT)).is_success
        assert (
            await gateway.client.post("/v1/chat/completions", json={**CHAT, "model": "x"})
        ).status_code == 404
        assert (
            await gateway.client.post("/v1/chat/completions", json={**CHAT, "model": "e"})
        ).status_code == 500
        hold.touch()
        await leave(gateway)
        nvml.events.put((nvml.cards[0], 13))
        await wait_until_seen(ends)
        hold.unlink()
        assert not ends & exposed_names
        await gateway.client.post("/admin/models/m/stop")
        nvml.events.put((nvml.cards[1], 79))
        await wait_until_seen(set())
