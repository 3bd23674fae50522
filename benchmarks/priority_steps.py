"""Chats next to batches of one model, on real sockets and in counted steps of the engine.

    python -m benchmarks.priority_steps [--seconds 120] [--places 32 64] [--order arrival]

The scripted engine computes in steps as vLLM does. A step has TOKENS tokens: one for each running
request, then pieces of prompts, first those that have begun. One prompt takes at most --piece
tokens of a step, which is the quarter that a plan sets. The engine runs `places` requests, and
stops none. The gateway, the engine and all clients are in one process with a clock of their own,
which moves by steps alone, so other work of the machine changes no figure.

200 requests of class `batch` are always in flight, of 100 to 300 tokens each (--lockstep: 200).
20 clients of class `interactive` ask for 40 tokens, and again a second after the answer. Printed:

first token  of chats alone and next to the batch, p50 and p95 in ms; the goal is 1.2 times alone
late         chats whose first token came after more than one step longer than possible
as one       the p95 where all requests have one class
batch        tokens per second alone: straight from the engine, and through the gateway; the goal
             is a loss of 10 %. All tokens per second next to the chats, by both classes
flood        next to 100 chats without pauses: the part of the places that the batch holds, and
             the most chats that began while the batch had less than an eighth of the places
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import heapq
import itertools
import json
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httptools
import uvicorn
from uvicorn.server import ServerState

from gateway.proxy.client_connection import client_protocol
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.limits import Limits
from gateway.proxy.routing.class_places import TURN
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes
from tests.support.dataplane import ANSWER, DONE, Everyone, echo, event
from tests.support.quantiles import quantile_s
from tests.support.upstream import Call, Upstream

STEP_S, RUNNING_S, TOKEN_S = 0.025, 0.00005, 0.00001
TOKENS = 2048
BATCHES, CHATS, FLOOD = 200, 20, 100
CHAT_TOKENS, PAUSE_S = 40, 1.0
CHAT_PROMPT, BATCH_PROMPTS = 200, (100, 1500)
SETTLING_S = 30.0
SEED = 20261130
_PRIORITY = re.compile(rb'"priority":(-?\d+)')


class Clock:
    """The time of engine, gateway and clients, in seconds and steps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step = 0


class ClockedRoutes(Routes):
    """Routes by the clock of the benchmark."""

    def __init__(self, clock: Clock, table: RouteTable) -> None:
        super().__init__(table, 1000)
        self._clock = clock

    def clock_s(self) -> float:
        return self._clock.now


@dataclass(eq=False)
class Request:
    """A request of a crowd. prompt: its tokens that are not computed yet. tokens: those of the
    answer that are missing."""

    class_: str
    prompt: int
    tokens: int
    arrived_s: float = 0.0
    arrived_step: int = 0
    first_s: float | None = None
    first_step: int = 0
    call: Call | None = None
    body: bytes = field(default=b"", repr=False)


class StepEngine:
    """An engine that computes in steps."""

    def __init__(self, clock: Clock, places: int, piece: int, *, is_ordered: bool) -> None:
        self._clock = clock
        self._places = places
        self._piece = piece
        self._is_ordered = is_ordered
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, Request]] = []
        self._running: list[Request] = []
        self._ends: dict[Request, asyncio.Event] = {}
        self.requests: dict[str, Request] = {}
        self.received = 0
        self.tokens: dict[str, int] = {}
        self._overtakings = 0
        self.most_overtakings = 0
        self.held = 0  # places of batches, summed over the steps

    async def script(self, call: Call) -> None:
        request = self.requests[json.loads(call.body)["user"]]
        request.call = call
        priority = _PRIORITY.search(call.body) if self._is_ordered else None
        rank = int(priority[1]) if priority is not None else 0
        end = self._ends[request] = asyncio.Event()
        heapq.heappush(self._waiting, (rank, next(self._order), request))
        self.received += 1
        await end.wait()

    def begin_step(self) -> tuple[float, list[Request]]:
        """The seconds of the next step, and the requests that get a token by it."""
        budget = TOKENS
        tokened: list[Request] = []
        for request in self._running:
            tokens = min(max(1, request.prompt), self._piece, budget)
            budget -= tokens
            tokened += self._compute(request, tokens)
        while self._waiting and budget and len(self._running) < self._places:
            request = heapq.heappop(self._waiting)[2]
            self._running.append(request)
            self._note_begin(request)
            tokens = min(request.prompt, self._piece, budget)
            budget -= tokens
            tokened += self._compute(request, tokens)
        self.held += self._batch_count()
        self._clock.step += 1
        return STEP_S + RUNNING_S * len(self._running) + TOKEN_S * (TOKENS - budget), tokened

    def _batch_count(self) -> int:
        return sum(request.class_ == "batch" for request in self._running)

    def _note_begin(self, request: Request) -> None:
        if request.class_ == "batch" or self._batch_count() >= max(1, self._places // TURN):
            self._overtakings = 0
        else:
            self._overtakings += 1
            self.most_overtakings = max(self.most_overtakings, self._overtakings)

    def _compute(self, request: Request, tokens: int) -> Iterator[Request]:
        is_prompt = request.prompt > 0
        request.prompt -= tokens if is_prompt else 0
        if tokens and request.prompt == 0:
            yield request

    async def end_step(self, tokened: list[Request]) -> None:
        """Send the tokens of the step: the first one of a chat, and the whole answer of a
        batch."""
        for request in tokened:
            request.tokens -= 1
            self.tokens[request.class_] = self.tokens.get(request.class_, 0) + 1
            call = request.call
            assert call is not None
            if request.first_s is None:
                request.first_s, request.first_step = self._clock.now, self._clock.step
                if request.class_ != "batch":
                    await call.start()
                    await call.chunk(event("word "))
            if request.tokens == 0:
                if request.class_ == "batch":
                    await call.reply(json.dumps(ANSWER).encode())
                else:
                    await call.chunk(DONE)
                    await call.end()
                self._running.remove(request)
                self._ends.pop(request).set()


class Client(asyncio.Protocol):
    """A connection for requests one after the other."""

    answers = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def ask(self, request: Request) -> asyncio.Future[None]:
        self._parser = httptools.HttpResponseParser(self)
        self._end = asyncio.get_running_loop().create_future()
        self._transport.write(request.body)
        return self._end

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        Client.answers += 1
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if (status := self._parser.get_status_code()) != 200:
            raise SystemExit(f"the answer has the status {status}")
        self._end.set_result(None)


class Crowd(NamedTuple):
    """Clients of one class. pause_s: between an answer and the next request. header: the class in
    the request; "" for none."""

    class_: str
    clients: int
    pause_s: float
    header: str


class Figures(NamedTuple):
    """Figures of one measurement.

    firsts: seconds to the first tokens of chats.
    late_part: chats whose first token took a step more than alone.
    tokens_s: tokens per second by class.
    batch_part: the part of the places that the batch held.
    gap: the most chats that began while the batch had less than its share.
    """

    firsts: list[float]
    late_part: float
    tokens_s: dict[str, float]
    batch_part: float
    gap: int


class Measurement:
    """Crowds that ask one engine for a time, directly or through a gateway."""

    def __init__(self, options: argparse.Namespace, places: int, *crowds: Crowd) -> None:
        self._clock = Clock()
        self._random = random.Random(SEED)
        self._options = options
        self._places = places
        self._crowds = crowds
        is_ordered = options.order == "priority"
        self._engine = StepEngine(self._clock, places, options.piece, is_ordered=is_ordered)
        self._numbers = itertools.count()
        # The next requests, by the time of their arrival.
        self._arrivals: list[tuple[float, int, Crowd, Client]] = []
        self._asked: list[Request] = []

    def _request(self, crowd: Crowd) -> Request:
        number = next(self._numbers)
        is_batch = crowd.class_ == "batch"
        low, high = (200, 200) if self._options.lockstep else (100, 300)
        tokens = self._random.randint(low, high) if is_batch else CHAT_TOKENS
        prompt = self._random.randint(*BATCH_PROMPTS) if is_batch else CHAT_PROMPT
        request = Request(crowd.class_, prompt, tokens)
        body = json.dumps(
            {
                "model": "m",
                "user": f"u{number}",
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": tokens,
                **({} if is_batch else {"stream": True}),
            }
        ).encode()
        line = b"x-fitserve-priority: %b\r\n" % crowd.header.encode() if crowd.header else b""
        request.body = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"%bcontent-length: %d\r\n\r\n%b"
        ) % (line, len(body), body)
        self._engine.requests[f"u{number}"] = request
        return request

    def _arrive(self, until_s: float) -> None:
        """Send the requests whose time has come."""
        while self._arrivals and self._arrivals[0][0] <= until_s:
            arrived_s, _, crowd, client = heapq.heappop(self._arrivals)
            request = self._request(crowd)
            request.arrived_s, request.arrived_step = arrived_s, self._clock.step
            self._asked.append(request)
            end = client.ask(request)
            end.add_done_callback(functools.partial(self._plan, crowd, client))

    def _plan(self, crowd: Crowd, client: Client, _: object) -> None:
        pause_s = crowd.pause_s * self._random.uniform(0.5, 1.5)
        row = (self._clock.now + pause_s, next(self._numbers), crowd, client)
        heapq.heappush(self._arrivals, row)

    async def _settle(self) -> None:
        """Wait until no byte is on its way between clients, gateway and engine."""
        quiet = 0
        while quiet < 3:
            state = self._engine.received, Client.answers
            for _ in range(6):
                await asyncio.sleep(0)
            quiet = quiet + 1 if state == (self._engine.received, Client.answers) else 0

    async def run(self, *, has_gateway: bool) -> Figures:
        async with Upstream(self._engine.script) as upstream:
            if not has_gateway:
                return await self._run(upstream.url.rpartition(":")[2])
            async with gateway(self._clock, upstream.url, self._places, self._options) as port:
                return await self._run(port)

    async def _run(self, port: str) -> Figures:
        loop, clients = asyncio.get_running_loop(), []
        for crowd in self._crowds:
            for place in range(crowd.clients):
                _, client = await loop.create_connection(Client, "127.0.0.1", int(port))
                clients.append(client)
                arrival_s = crowd.pause_s * place / crowd.clients
                heapq.heappush(self._arrivals, (arrival_s, next(self._numbers), crowd, client))
        self._arrive(0.0)
        await self._settle()
        await self._step_until(SETTLING_S)
        engine, steps = self._engine, self._clock.step
        engine.tokens.clear()
        engine.held = engine.most_overtakings = 0
        await self._step_until(SETTLING_S + self._options.seconds)
        for client in clients:
            client.close()
        await self._settle()
        return self._figures(self._clock.step - steps)

    async def _step_until(self, until_s: float) -> None:
        clock, engine = self._clock, self._engine
        while clock.now < until_s:
            step_s, tokened = engine.begin_step()
            clock.now += step_s
            self._arrive(clock.now)
            await self._settle()
            await engine.end_step(tokened)
            await self._settle()

    def _figures(self, steps: int) -> Figures:
        chats = [
            request
            for request in self._asked
            if request.class_ != "batch" and request.arrived_s > SETTLING_S
        ]
        for chat in chats:
            if chat.first_s is None:  # its wait so far
                chat.first_s, chat.first_step = self._clock.now, self._clock.step + 1
        lates = [chat for chat in chats if chat.first_step - chat.arrived_step > 1]
        engine, seconds = self._engine, self._options.seconds
        return Figures(
            [chat.first_s - chat.arrived_s for chat in chats if chat.first_s],
            len(lates) / max(1, len(chats)),
            {class_: tokens / seconds for class_, tokens in engine.tokens.items()},
            engine.held / steps / self._places,
            engine.most_overtakings,
        )


@asynccontextmanager
async def gateway(
    clock: Clock, url: str, places: int, options: argparse.Namespace
) -> AsyncIterator[str]:
    """The port of a data plane before the engine."""
    factor = int(options.order == "priority")
    replica = RoutedReplica(url, "m.0", "m", places + places // 4, priority_factor=factor)
    table = RouteTable({"m": ModelRoute("m", "ready", "", 0, (replica,), "generate")})
    limits = Limits(
        connections=2000, connections_per_address=2000, queue_timeout_s=3600, engine_silence_s=3600
    )
    plane = DataPlane(ClockedRoutes(clock, table), Everyone(), limits)
    config = uvicorn.Config(echo, http=client_protocol(plane), lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config, state, {}),  # type: ignore[call-arg]
        "127.0.0.1",
        0,
        backlog=1024,
    )
    try:
        yield str(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        plane.close()


def measure(
    options: argparse.Namespace, places: int, *crowds: Crowd, has_gateway: bool = True
) -> Figures:
    return asyncio.run(Measurement(options, places, *crowds).run(has_gateway=has_gateway))


def report(options: argparse.Namespace, places: int) -> None:
    batch = Crowd("batch", options.batches, 0.0, "batch")
    chats = Crowd("interactive", options.chats, PAUSE_S, "interactive")
    flood = chats._replace(clients=options.chats * FLOOD // CHATS, pause_s=0.0)
    direct = measure(options, places, batch, has_gateway=False)
    batch_alone = measure(options, places, batch)
    alone = measure(options, places, chats)
    both = measure(options, places, chats, batch)
    one_class = measure(options, places, *(crowd._replace(header="") for crowd in (chats, batch)))
    flooded = measure(options, places, flood, batch)
    p50, p95 = (
        [1000 * quantile_s(figures.firsts, share) for figures in (alone, both, one_class)]
        for share in (0.5, 0.95)
    )
    rates = [sum(figures.tokens_s.values()) for figures in (direct, batch_alone, both)]
    print(
        f"{places:>6}{p50[0]:>9.0f}{p95[0]:>8.0f}{p50[1]:>10.0f}{p95[1]:>8.0f}"
        f"{p95[1] / p95[0]:>7.2f}{both.late_part:>7.1%}{p95[2]:>9.0f}"
        f"{rates[0]:>9.0f}{rates[1]:>9.0f}{1 - rates[1] / rates[0]:>7.1%}"
        f"{both.tokens_s['batch']:>9.0f}{both.tokens_s['interactive']:>7.0f}"
        f"{1 - rates[2] / rates[0]:>7.1%}{flooded.batch_part:>8.1%}{flooded.gap:>6}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--places", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--order", choices=["priority", "arrival"], default="priority")
    parser.add_argument("--piece", type=int, default=TOKENS // 4, help="of a prompt, in tokens")
    parser.add_argument("--lockstep", action="store_true", help="all batch requests are equal")
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--chats", type=int, default=CHATS)
    options = parser.parse_args()
    print(
        "        chats alone       next to the batch         as one  batch: tokens/s      "
        "     next to chats          flood"
    )
    print(
        "places   p50 ms  p95 ms    p50 ms  p95 ms  times   late   p95 ms   direct  gateway"
        "   loss    batch  chats   loss    part   gap"
    )
    for places in options.places:
        report(options, places)


if __name__ == "__main__":
    main()
