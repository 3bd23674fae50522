"""Authentication before a real engine with open development endpoints: no path answers without the
key."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.engines.common.engine_auth import DEV_MODE, wrap_command
from gateway.profiles.profiles import Profiles
from tests.contract.process_harness import free_port
from tests.e2e.conftest import ENGINE, START_S, wait_for
from tests.support.patience import hang_s

pytestmark = pytest.mark.engine

KEY = "0123456789abcdef"
OPENED = {
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/update_weights",
    "/server_info",
}


@pytest.fixture(scope="module")
def client(
    engines: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Of the engine, as nobody in particular."""
    profile, port = Profiles().engine(ENGINE), free_port()
    folder = tmp_path_factory.mktemp("door")
    program = tuple(
        part.replace("{env}", str(engines / ENGINE.replace("==", "-")))
        for part in profile.process_command
    )
    arguments = (
        f"--model={demo_model}",
        "--served-model-name=m",
        "--host=127.0.0.1",
        f"--port={port}",
        "--max-model-len=512",
    )
    env = {
        **os.environ,
        **profile.env,
        **profile.eager_env,
        **dict([DEV_MODE]),
        "VLLM_API_KEY": KEY,
        "HOME": str(folder),
    }
    # Findings of earlier starts about classes: 10 s of processor time.
    for cache_folder in (engines.parent / "caches").glob(
        f"*/*/{profile.caches['VLLM_CACHE_ROOT']}"
    ):
        env["VLLM_CACHE_ROOT"] = str(cache_folder)
    with (
        (folder / "log").open("wb") as log,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=hang_s()
        ) as asking,
    ):
        command = [
            *wrap_command(program, profile.key_env),
            *arguments,
            "--enforce-eager",
            "--kv-cache-memory-bytes=200000000",
        ]
        # vLLM 0.32.0 computes bfloat16 attention by AMX, where the CPU has it, and leaves it to
        # oneDNN to ask Linux for that, which does so with a prompt of more than a few tokens: else
        # it ends with SIGILL.
        command += ["--dtype=float32"]
        engine = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
        try:
            wait_for(
                "it answers",
                lambda: engine.poll() is not None or asking.get("/health").status_code,
                START_S,
            )
            assert engine.poll() is None, (folder / "log").read_text()[-3000:]
            yield asking
        finally:
            engine.terminate()
            engine.wait(hang_s())


def test_every_path_wants_the_key_and_with_it_the_engine_answers(client: httpx.Client) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    paths = client.get("/openapi.json", headers=key).json()["paths"]
    assert paths.keys() >= OPENED
    requests = [(method, path) for path, methods in paths.items() for method in methods]
    requests += [
        ("get", "/openapi.json"),
        ("get", "/docs"),
        ("post", "/nowhere"),
        ("options", "/sleep"),
    ]
    open_ones = [
        (method, path)
        for method, path in requests
        if client.request(method, path).status_code != 401
    ]
    assert not open_ones
    assert client.get("/is_sleeping", headers=key).json() == {"is_sleeping": False}
    body = {"model": "m", "prompt": "hi", "max_tokens": 2}
    assert client.post("/v1/completions", json=body, headers=key).status_code == 200
