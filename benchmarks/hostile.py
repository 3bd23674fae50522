"""The cost of slow and hostile clients.

    python -m benchmarks.hostile [--parts senders,readers,streams,crowd] [--sockets 2000]
                                 [--seconds 600] [--clients 300] [--attackers 20] [--workers 1]
                                 [--kill-s 15]

A gateway with its default limits stands before one engine, each a process.

senders    many sockets send the head of a request at one byte per second: the time of their end
readers    many clients ask for a stream of 10 MiB and read 1 KiB per second: memory of each, and
           memory that stays afterwards. A tenth reads nothing, and must be cut off after 120 s
streams    half as many streams of 5 events per second for --seconds: errors, memory, CPU
crowd      --clients for --seconds, half of which leave in the middle, while one of two engines is
           killed every --kill-s. Then the same during --attackers of each kind of
           tests/hostile/attackers.py: time-outs, memory, descriptors, and times of answers. The
           gateway starts scripted engines. --workers 2: memory of each process. The processor
           time of each process, and the mean time that its threads waited for a core: a part of
           each answer's time that the machine adds, not the gateway
           Exit code 1 for a broken promise of docs/security.md

Beside senders and readers, ordinary clients send one request after the other: their times alone and
during them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from gateway.proxy.limits import STALL_S
from tests.contract.process_harness import free_port
from tests.e2e.crowd import crowd, quantile
from tests.support.served import Served, serve_models
from tests.support.upstream import Call, Upstream

KEY = "a-key-of-the-hostile-runs-that-nobody-guesses"
# More than one address may have (FITSERVE_MAX_CONNECTIONS_PER_ADDRESS).
ADDRESSES = ("127.0.0.1", "127.0.0.2")
GOOD = 8
OPENING = 16
PIECE = (b"data: " + b"x" * 1016 + b"\n\n") * 64
BIG_BYTES = 10 * 2**20
EVENT_S = 0.2
KILL_S = 15.0
GROWTH, SLOWER = 0.05, 2.0
PROXIES = Path(__file__).parent / "proxies"
ESTABLISHED = 1
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def request(*, stream: bool = False) -> bytes:
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            **({"stream": True} if stream else {}),
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer"
        f" {KEY}\r\ncontent-type: application/json\r\n"
    )
    return head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def engine(call: Call) -> None:
    """A stream is one of 10 MiB, as fast as they are taken."""
    if call.head[0].startswith(b"GET"):
        await call.reply(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
    elif b'"stream"' in call.body:
        await call.start()
        for _ in range(BIG_BYTES // len(PIECE)):
            await call.chunk(PIECE)
        await call.end()
    else:
        await call.reply(b'{"choices":[]}')


async def good(port: int, seconds: list[float]) -> None:
    """Requests one after the other, with pauses. A refused request counts as endless."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        began = time.monotonic()
        writer.write(request())
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        seconds.append(time.monotonic() - began if head.startswith(b"HTTP/1.1 200") else math.inf)
        await asyncio.sleep(0.05)


def good_clients(port: int, pipe: Connection) -> None:
    """A process of their own: this one is busy with the others. Tells what their requests took,
    once it is asked."""
    seconds: list[float] = []

    async def run() -> None:
        clients = [asyncio.create_task(good(port, seconds)) for _ in range(GOOD)]
        await asyncio.to_thread(pipe.recv)
        for client in clients:
            client.cancel()

    asyncio.run(run())
    pipe.send(seconds)


@contextlib.asynccontextmanager
async def good_traffic(port: int) -> AsyncIterator[list[float]]:
    """Filled at the end: seconds that the requests took."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=good_clients, args=(port, theirs), daemon=True)
    process.start()
    await asyncio.sleep(1)
    seconds: list[float] = []
    yield seconds
    ours.send(None)
    seconds += await asyncio.to_thread(ours.recv)
    await asyncio.to_thread(process.join)


def quantiles_ms(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return (
        f"p50 {statistics.median(ordered) * 1000:.1f} ms, p99"
        f" {ordered[int(0.99 * len(ordered))] * 1000:.1f} ms of {len(ordered)}"
    )


async def senders(gateway: Served, sockets: int) -> None:
    async with good_traffic(gateway.port) as alone:
        await asyncio.sleep(10)
    before = gateway.resident_mib
    head = request()[: request().index(b"\r\n\r\n")]

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
        """Seconds until the gateway closed it, whatever it said before."""
        began = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in itertools.chain(head, itertools.repeat(ord("a"))):
                writer.write(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        if not await reader.read(1024):
                            break
        writer.transport.abort()
        return time.monotonic() - began

    async def send_head(number: int) -> float:
        address = (ADDRESSES[number % len(ADDRESSES)], 0)
        return await slow(
            *await asyncio.open_connection("127.0.0.1", gateway.port, local_addr=address)
        )

    async with good_traffic(gateway.port) as attacked:
        sending = [asyncio.create_task(send_head(number)) for number in range(sockets)]
        await asyncio.sleep(8)
        growth = gateway.resident_mib - before
        lives = await asyncio.gather(*sending)
    print(
        f"senders: {sockets} sockets, each closed after {min(lives):.1f} to {max(lives):.1f} s;"
        f" memory {growth:+.0f} MiB",
        flush=True,
    )
    print(
        f"         good clients alone {quantiles_ms(alone)}; attacked {quantiles_ms(attacked)}",
        flush=True,
    )


async def readers(gateway: Served, sockets: int) -> None:
    async with good_traffic(gateway.port) as alone:
        await asyncio.sleep(10)
    before, peak, loop = gateway.resident_mib, 0.0, asyncio.get_running_loop()
    kernel, kernel_peak = kernel_mib(), 0.0
    opening, open_at = asyncio.Semaphore(OPENING), list[float]()

    async def slow(number: int) -> float | None:
        """Seconds until the gateway cut it off; None: it did not."""
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
            client.bind((ADDRESSES[number % len(ADDRESSES)], 0))
            async with opening:
                await loop.sock_connect(client, ("127.0.0.1", gateway.port))
                await loop.sock_sendall(client, request(stream=True))
                head = await loop.sock_recv(client, 1024)
            assert head.startswith(b"HTTP/1.1 200"), head
            began = time.monotonic()
            open_at.append(began)
            while len(open_at) < sockets or time.monotonic() < max(open_at) + STALL_S + 30:
                await asyncio.sleep(1)
                if number % 10 == 0:
                    if client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
                        return time.monotonic() - began
                elif not await _receive(loop, client):
                    return time.monotonic() - began
        return None

    async with good_traffic(gateway.port) as attacked:
        reading = [asyncio.create_task(slow(number)) for number in range(sockets)]
        while not all(task.done() for task in reading):
            await asyncio.sleep(1)
            peak = max(peak, gateway.resident_mib - before)
            kernel_peak = max(kernel_peak, kernel_mib() - kernel)
        ends = await asyncio.gather(*reading)
    await asyncio.sleep(5)
    cut = [seconds for seconds in ends[::10] if seconds is not None]
    others = sum(seconds is not None for number, seconds in enumerate(ends) if number % 10)
    print(
        f"readers: {sockets} clients: {peak:+.0f} MiB, {peak * 1024 / sockets:.0f} KiB each;"
        f" {gateway.resident_mib - before:+.0f} MiB once they are gone; the kernel's for all"
        f" sockets {kernel_peak:+.0f} MiB; of {len(ends[::10])} that read nothing {len(cut)} were"
        f" cut off, after {min(cut, default=0):.0f} to {max(cut, default=0):.0f} s; of the others"
        f" {others}",
        flush=True,
    )
    print(
        f"         good clients alone {quantiles_ms(alone)}; attacked {quantiles_ms(attacked)}",
        flush=True,
    )


async def _receive(loop: asyncio.AbstractEventLoop, client: socket.socket) -> bytes:
    try:
        async with asyncio.timeout(1):
            return await loop.sock_recv(client, 1024)
    except TimeoutError:
        return b"nothing yet"
    except OSError:
        return b""


async def streams(gateway: Served, count: int, seconds: float) -> None:
    load = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            str(PROXIES / "load.py"),
            f"{gateway.url}/v1",
            "stream",
            "--streams",
            str(count),
        ),
        *("--chunks", str(int(seconds / EVENT_S)), "--deadline", str(2 * seconds + 60)),
        env={**os.environ, "FITSERVE_BENCH_KEY": KEY},
        stdout=asyncio.subprocess.PIPE,
    )
    ended = asyncio.create_task(load.communicate())
    began, cpu = time.monotonic(), cpu_s(gateway)
    sizes: list[tuple[float, float]] = []
    while not ended.done():
        await asyncio.sleep(1)
        sizes.append((time.monotonic() - began, gateway.resident_mib))
    document = json.loads((await ended)[0])
    # The first minute is for opening them.
    settled = [(at, size) for at, size in sizes if min(60.0, seconds / 4) < at < seconds]
    slope = 60 * statistics.linear_regression(*zip(*settled, strict=True)).slope
    print(
        f"streams: {count} for {seconds:.0f} s: {document['errors']} errors;"
        f" {max(size for _, size in sizes):.0f} MiB, {slope:+.2f} MiB per minute;"
        f" {(cpu_s(gateway) - cpu) / document['wall_s']:.2f} cores; first event p50"
        f" {document['first_p50_ms']:.0f} ms, a stream's whole time p50"
        f" {document['p50_ms'] / 1000:.1f} s, p99 {document['p99_ms'] / 1000:.1f} s",
        flush=True,
    )


async def both_crowds(
    clients: int, each: int, seconds: float, processes: int, kill_s: float
) -> bool:
    """Whether all is as it is to be."""
    good, p99s = True, []
    for number in (0, each):
        with tempfile.TemporaryDirectory() as folder:
            figures = await crowd(
                Path(folder),
                count=clients,
                tokens=number,
                seconds=seconds,
                kill_s=kill_s,
                processes=processes,
            )
        p99s.append(figures.p99_s())
        before, after = figures.descriptors
        p50_ms = quantile(figures.counts.first, 0.5) * 1000
        print(
            f"crowd:   {clients} clients for {seconds:.0f} s, {number} attackers of each kind:"
            f" {dict(figures.counts.ended)}; first byte p50 {p50_ms:.0f} ms, p99"
            f" {p99s[-1][0] * 1000:.0f} ms, whole answer p99 {p99s[-1][1] * 1000:.0f} ms;"
            f" {figures.kills} engines killed; MiB each minute"
            f" {figures.each_minute()}, {figures.growth:+.1%} once warm; descriptors {before},"
            f" after {after}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        print(
            "         "
            + "; ".join(
                f"{name} {processor_time.describe(seconds)}"
                for name, processor_time in figures.processor.items()
            ),
            flush=True,
        )
        if number:
            print(f"         attempts {dict(figures.attempts)}", flush=True)
        good &= not figures.counts.ended["timeout"] and figures.growth <= GROWTH and after <= before
    first, whole = (attacked / alone for alone, attacked in zip(*p99s, strict=True))
    print(
        f"         p99 during attacks / alone: first byte {first:.2f}, whole answer {whole:.2f}",
        flush=True,
    )
    return good and whole <= SLOWER


def run_engine(pipe: Connection) -> None:
    async def run() -> None:
        async with Upstream(engine) as upstream:
            for listener in upstream._server.sockets:  # noqa: SLF001
                # What an engine has sent and the gateway has not taken is the engine's.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
            pipe.send(upstream.url)
            await asyncio.Event().wait()

    asyncio.run(run())


@contextlib.asynccontextmanager
async def big_engine() -> AsyncIterator[str]:
    """`engine` in a process of its own. Its URL."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=run_engine, args=(theirs,), daemon=True)
    process.start()
    yield await asyncio.to_thread(ours.recv)
    process.kill()
    process.join()


@contextlib.asynccontextmanager
async def paced_engine(seconds: float) -> AsyncIterator[str]:
    """The engine of benchmarks/proxies, which costs less than this one would. Its URL."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROXIES / "fake_engine.py"), str(port)
    )
    try:
        query = f"chunks={int(seconds / EVENT_S)}&interval_ms={EVENT_S * 1000:.0f}"
        pace = f"http://127.0.0.1:{port}/pace?{query}"
        async with httpx.AsyncClient(
            trust_env=False, transport=httpx.AsyncHTTPTransport(retries=10)
        ) as client:
            (await client.get(pace)).raise_for_status()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


def kernel_mib() -> float:
    """The TCP memory of the whole machine."""
    return (
        int(
            Path("/proc/net/sockstat")
            .read_text()
            .partition("TCP: ")[2]
            .partition(" mem ")[2]
            .split()[0]
        )
        * PAGE
        / 2**20
    )


def cpu_s(gateway: Served) -> float:
    fields = Path(f"/proc/{gateway.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.asynccontextmanager
async def gateway_before(url: str) -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory() as folder:
        running = serve_models(Path(folder), {"m": [f"{url}/v1"]}, KEY)
        gateway = await asyncio.to_thread(running.__enter__)
        try:
            yield gateway
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)


async def run(options: argparse.Namespace) -> bool:
    """Whether all is as it is to be."""
    parts, sockets, seconds = options.parts.split(","), options.sockets, options.seconds
    for name, part in (("senders", senders), ("readers", readers)):
        if name in parts:
            async with big_engine() as url, gateway_before(url) as gateway:
                await part(gateway, sockets)
    if "streams" in parts:
        async with paced_engine(seconds) as url, gateway_before(url) as gateway:
            await streams(gateway, sockets // 2, seconds)
    return "crowd" not in parts or await both_crowds(
        options.clients, options.attackers, seconds, options.workers, options.kill_s
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="senders,readers,streams,crowd")
    parser.add_argument("--sockets", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--attackers", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--kill-s",
        type=float,
        default=KILL_S,
        help="seconds between two kills of an engine; inf: none",
    )
    sys.exit(0 if asyncio.run(run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
