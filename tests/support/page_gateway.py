"""A gateway with scripted engines for tests that drive a browser, which runs in another thread than
the gateway."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from gateway.domain import LaunchSpec
from tests.support.fake_nvml import two_3090
from tests.support.makers import LLAMA_8B, machine
from tests.support.paths import ROOT
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

ENGINES = ["vllm==0.26.0"]
FAILED_LOG = tuple(
    (0, line)
    for line in (ROOT / "tests/logs/failed-000-wna16-n32-0.19.1.log").read_text().splitlines()
)
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def script(spec: LaunchSpec) -> EngineScript:
    if spec.model.startswith("bad"):
        return EngineScript(
            model=spec.model, lines=((0, HOSTILE), *FAILED_LOG), exit_code=1, serve=False
        )
    return EngineScript(model=spec.model, max_model_len=400_000)


class Served:
    """A gateway in a thread of its own, so that the browser can be driven from this one."""

    def __init__(self, portal: BlockingPortal, running: Running) -> None:
        self._portal, self._gateway = portal, running
        self.url = running.url

    def add(self, name: str, source: Path, **fields: Any) -> None:
        self._portal.call(
            lambda: self._gateway.add(name, source, engines=ENGINES, gpus=1, **fields)
        )

    def until(self, name: str, state: str) -> None:
        self._portal.call(self._gateway.until, name, state)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._portal.call(lambda: self._gateway.client.request(method, path, json=body))
        assert answer.status_code < 300, answer.text
        return answer.json()

    @contextlib.contextmanager
    def asks(self, path: str, body: Any) -> Iterator[Future[str]]:
        """A client that asks for a stream; gives its whole answer."""

        async def read() -> str:
            return (await self._gateway.client.post(path, json=body)).text

        answer = self._portal.start_task_soon(read)
        yield answer
        answer.cancel()

    def enter(self, manager: Any) -> Any:
        return self._portal.wrap_async_context_manager(manager)


@contextlib.contextmanager
def gateway(folder: Path, *, has_gpus: bool = True, **settings: Any) -> Iterator[Served]:
    """has_gpus: two of them, else the machine of the tests without its GPUs."""
    machine_parts: dict[str, Any] = (
        {"hardware": machine("2x3090"), "nvml": two_3090()} if has_gpus else {}
    )
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(
            running(folder, script, **machine_parts, **settings)
        ) as server,
    ):
        if settings.get("admin_key"):
            server.client.headers["authorization"] = f"Bearer {settings['admin_key']}"
        yield Served(portal, server)


def llama(folder: Path) -> Path:
    return model_folder(folder, **{**LLAMA_8B, "max_position_embeddings": 8192})
