"""The cost of the page at /.

    python -m benchmarks.page [--pages 200] [--models 10] [--seconds 30]

All models are endpoints of a scripted engine. Printed: the bytes of all files and the gateway's
time for them over one connection, then its CPU time without a page, with idle `--pages`, and with
busy clients, compared with the same clients without a page.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tests.support.dataplane import ASK, CHAT, answers
from tests.support.served import Served, serve_models
from tests.support.upstream import Call, Upstream

_TICKS = os.sysconf("SC_CLK_TCK")
_ROUNDS = 50


async def engine(call: Call) -> None:
    if call.head[0].startswith(b"GET"):
        await call.reply(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')
    else:
        await answers(call)


def cpu_s(gateway: Served) -> float:
    fields = Path(f"/proc/{gateway.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def files(gateway: Served) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:
        index = await client.get("/")
        names = re.findall(r'(?:href|src)="(/[^"#]+)"', index.text)
        total = len(index.content) + sum([len((await client.get(name)).content) for name in names])
        firsts, wholes = [], []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            await client.get("/")
            firsts.append(time.perf_counter() - began)
            for name in names:
                await client.get(name)
            wholes.append(time.perf_counter() - began)
    print(f"files      {len(names) + 1}, {total:,} bytes, not compressed")
    print(
        f"the HTML   {statistics.median(firsts) * 1e3:.1f} ms, all files"
        f" {statistics.median(wholes) * 1e3:.0f} ms (client and server together)"
    )


@contextlib.asynccontextmanager
async def open_pages(gateway: Served, count: int) -> AsyncIterator[None]:
    """So many pages, which read all that they are sent."""
    port, writers, readers = gateway.port, [], []

    async def read(reader: asyncio.StreamReader) -> None:
        while await reader.read(65536):
            pass

    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /admin/live HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n\r\n" % port)
        writers.append(writer)
        readers.append(asyncio.create_task(read(reader)))
    try:
        yield
    finally:
        for task in readers:
            task.cancel()
        for writer in writers:
            writer.transport.abort()


async def ask(gateway: Served, per_s: float) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:
        while True:
            await client.post(CHAT, json=ASK | {"model": "m0"})
            await asyncio.sleep(1 / per_s)


async def share(gateway: Served, pages: int, seconds: float, *, asked: bool = False) -> float:
    """Of one core, in percent."""
    async with open_pages(gateway, pages):
        asking = asyncio.create_task(ask(gateway, 20)) if asked else None
        await asyncio.sleep(3)
        began, before = time.monotonic(), cpu_s(gateway)
        await asyncio.sleep(seconds)
        found = 100 * (cpu_s(gateway) - before) / (time.monotonic() - began)
        if asking is not None:
            asking.cancel()
    await asyncio.sleep(1)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        async with Upstream(engine) as upstream:
            models = {f"m{number}": [f"{upstream.url}/v1"] for number in range(args.models)}
            starting = serve_models(
                Path(folder), models, FITSERVE_MAX_CONNECTIONS_PER_ADDRESS="4096"
            )
            gateway = await asyncio.to_thread(starting.__enter__)
            try:
                await files(gateway)
                for words, asked in (("nothing happens", False), ("20 requests/s", True)):
                    without = await share(gateway, 0, args.seconds, asked=asked)
                    one = await share(gateway, 1, args.seconds, asked=asked)
                    many = await share(gateway, args.pages, args.seconds, asked=asked)
                    print(
                        f"{words:16} no page {without:.2f} %, one page {one:.2f} %, {args.pages}"
                        f" pages {many:.2f} % of a core"
                    )
            finally:
                await asyncio.to_thread(starting.__exit__, None, None, None)


if __name__ == "__main__":
    asyncio.run(main())
