"""Bytecodes and calls of the data plane, in this tree and in another one.

    python -m benchmarks.bytecodes --before TREE [--rounds 15]

TREE: another checkout, made by `git worktree add TREE COMMIT`. The parts are the choice of a
replica, a request and a streamed chunk. Counts do not depend on other work of the machine. The
choice of a replica also has the CPU time of the thread, best and median of the rounds. The request
is a later one of its connection; the chunk comes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS, CALLS, REPLICAS = 50, 50_000, (1, 4)
REQUESTS, CHUNKS = 40, (20, 60)
BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "x" * 800}], "stream": False}
)
USAGE = (
    b'"usage":{"prompt_tokens":10,"total_tokens":12,"completion_tokens":2,'
    b'"prompt_tokens_details":null}}'
)


class Count:
    """Of the thread whose tracer this is."""

    def __init__(self) -> None:
        self.codes = self.calls = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.codes += event == "opcode"
        self.calls += event == "call"
        return self


def lookup(replicas: int) -> dict[str, float]:
    """To find a model, pick a replica and count a request. ns: nanoseconds of one."""
    from gateway.proxy.access.auth import ANYONE
    from gateway.proxy.routing.routes import Routes
    from gateway.proxy.routing.table import Call, ModelRoute, RoutedReplica, RouteTable

    def route(name: str) -> ModelRoute:
        own = tuple(
            RoutedReplica(f"{name}-{index}", "http://127.0.0.1:1", "m") for index in range(replicas)
        )
        return ModelRoute(name, "ready", "", 0, own, "generate")

    names = [f"m{number}" for number in range(MODELS)]
    routes, call = (
        Routes(RouteTable({name: route(name) for name in names})),
        Call("chat", "m7", b"", False),
    )

    def request() -> None:
        replica = routes.pick(routes.table.find("m7", ANYONE), call)
        assert replica is not None
        routes.begin(replica)
        routes.end(replica)

    for _ in range(1000):
        request()
    began = time.thread_time_ns()
    for _ in range(CALLS):
        request()
    took_ns = (time.thread_time_ns() - began) / CALLS
    count = Count()
    sys.settrace(count)
    request()
    sys.settrace(None)
    return {"codes": count.codes, "calls": count.calls, "ns": took_ns}


async def relayed() -> dict[str, dict[str, float]]:
    """Per request, and per chunk, of a data plane that counts for metrics."""
    from gateway.proxy.metrics.counters import Metrics
    from tests.support.dataplane import CHAT, Gateway, model
    from tests.support.upstream import Call, Upstream

    async def engine(call: Call) -> None:
        asked = json.loads(call.body)
        if not asked["stream"]:
            await call.reply(b'{"choices":[{"message":{"content":"hello"}}],' + USAGE)
            return
        await call.start()
        for number in range(asked["max_tokens"]):
            await asyncio.sleep(0.005)
            await call.chunk(b'data: {"choices":[{"delta":{"content":"%06d"}}]}\n\n' % number)
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()

    with Gateway(meter=Metrics()) as gateway:
        async with Upstream(engine) as upstream:
            gateway.route(model(upstream.url))

            def counted(body: str, times: int) -> Count:
                """By the thread of the gateway."""
                client, count = socket.create_connection(("127.0.0.1", gateway.port)), Count()
                # In one piece, as clients send it.
                asks = (
                    b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type:"
                    b" application/json\r\ncontent-length: %d\r\n\r\n%b"
                )
                asked = asks % (CHAT.encode(), len(body), body.encode())
                for turn in range(times + 5):
                    if turn == 5:
                        gateway.catch_up()
                        gateway._loop.call_soon_threadsafe(sys.settrace, count)  # noqa: SLF001 - counted there
                    client.sendall(asked)
                    answer = b""
                    while not answer.endswith((USAGE, b"0\r\n\r\n")):
                        answer += client.recv(65536)
                gateway._loop.call_soon_threadsafe(sys.settrace, None)  # noqa: SLF001
                gateway.catch_up()
                client.close()
                return count

            request = await asyncio.to_thread(counted, BODY, REQUESTS)
            streams = [
                json.dumps({"model": "m", "stream": True, "max_tokens": chunks})
                for chunks in CHUNKS
            ]
            few, many = [await asyncio.to_thread(counted, body, 1) for body in streams]
    more = CHUNKS[1] - CHUNKS[0]
    return {
        "a request": {"codes": request.codes / REQUESTS, "calls": request.calls / REQUESTS},
        "a chunk": {
            "codes": (many.codes - few.codes) / more,
            "calls": (many.calls - few.calls) / more,
        },
    }


def measured(tree: Path) -> dict[str, dict[str, float]]:
    """`tree`, by a process of its own."""
    command = [sys.executable, __file__, "--measure"]
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        picks = {f"a choice among {replicas}": lookup(replicas) for replicas in REPLICAS}
        print(json.dumps({**picks, **asyncio.run(relayed())}))
        return
    if asked.before is None:
        parser.error("--before is missing: the checkout to compare with")
    rounds = [(measured(asked.before.resolve()), measured(ROOT)) for _ in range(asked.rounds)]
    for what in rounds[0][0]:
        codes, calls = [
            [median(one[side][what][kind] for one in rounds) for side in (0, 1)]
            for kind in ("codes", "calls")
        ]
        line = (
            f"{what}: {codes[0]:.0f} and {codes[1]:.0f} bytecodes ({codes[1] / codes[0] - 1:+.1%}),"
            f" {calls[0]:.1f} and {calls[1]:.1f} calls"
        )
        if "ns" in rounds[0][0][what]:
            times = [[one[side][what]["ns"] for one in rounds] for side in (0, 1)]
            for name, of in (("least", min), ("median", median)):
                before, now = of(times[0]), of(times[1])
                line += f"; {name} {before:.0f} and {now:.0f} ns ({now / before - 1:+.1%})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
