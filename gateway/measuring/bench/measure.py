"""What a served model does: the first token of long prompts, one answer alone, and answers of many
at once.

Prompts are random tokens of their own, so that no cache of prefixes helps. Every answer has the
same length. Each level begins with as many requests as it has at once; who has an answer asks again
until the seconds are over, and the last answers are waited for.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.domain import BenchLevel, BenchReport
from gateway.engines.common.speed.expectation import lengths
from gateway.errors import NotReady
from gateway.measuring.bench.streamed_answer import Answer, NoAnswer, Target, ask

_SHORT, _LONG = 2048, 32768
# Of the answer alone: its first token comes with the prompt, the others tell the pace.
_ALONE = 65
_TRIES = 3
_WARM_UP, _WARM_UP_TOKENS = 8, 16
# For one answer; a slow engine that is measured with hundreds at once needs minutes.
_PATIENCE_S = 600.0
# Tokens that a model keeps for itself are mostly among its first and its last.
_FIRST = 100


@dataclass
class Load:
    """Asks `target`, whose requests have `context` tokens at most. report: what is measured now,
    for people. asked: requests so far."""

    target: Target
    context: int
    report: Callable[[str], None] = lambda _: None
    asked: int = 0

    async def measure(self, levels: Sequence[int], seconds: float) -> BenchReport:
        """Raises NotReady where a request gets no answer."""
        try:
            return await self._measure(levels, seconds)
        except NoAnswer as error:
            raise NotReady(
                f"{self.target.model} did not answer as it was asked to: {error}.",
                hint=(
                    "Nothing was kept. Look at the engine's log; answers of a fixed length need"
                    " ignore_eos."
                ),
            ) from None

    async def _measure(self, levels: Sequence[int], seconds: float) -> BenchReport:
        read, written = lengths(self.context)
        self.report("warming up")
        await _together(
            [self._ask(min(read, 256), min(written, _WARM_UP_TOKENS)) for _ in range(_WARM_UP)]
        )
        self.report("one request alone")
        written_alone = max(2, min(_ALONE, self.context // 2))
        alone = await self._alone(min(_SHORT, self.context - written_alone), written_alone, seconds)
        long: list[Answer] = []
        if self.context >= _LONG:
            self.report("a prompt of 32k tokens")
            long = await self._alone(min(_LONG, self.context - 1), 1, seconds)
        measured = []
        for level in levels:
            self.report(f"{level} at once")
            measured.append(await self._level(level, read, written, seconds))
        paces = [
            (one.tokens - 1) / (one.whole_s - one.first_s)
            for one in alone
            if one.tokens > 1 and one.whole_s > one.first_s
        ]
        return BenchReport(
            prompt=read,
            answer=written,
            stream=_rounded(statistics.median(paces)) if paces else None,
            first_token_2k_s=_rounded(statistics.median(one.first_s for one in alone)),
            first_token_32k_s=(
                _rounded(statistics.median(one.first_s for one in long)) if long else None
            ),
            levels=tuple(measured),
        )

    async def _alone(self, prompt: int, tokens: int, seconds: float) -> list[Answer]:
        """Some, one after the other; one at least."""
        began, answers = time.perf_counter(), list[Answer]()
        while not answers or (len(answers) < _TRIES and time.perf_counter() - began < seconds):
            answers.append(await self._ask(prompt, tokens))
        return answers

    async def _level(self, concurrency: int, read: int, written: int, seconds: float) -> BenchLevel:
        first = [self._request(read, written) for _ in range(concurrency)]
        began, answers = time.perf_counter(), list[Answer]()

        async def stream(request: bytes) -> None:
            answers.append(await self._sent(request))
            while time.perf_counter() - began < seconds:
                answers.append(await self._ask(read, written))

        await _together([stream(request) for request in first])
        whole = time.perf_counter() - began
        return BenchLevel(
            concurrency=concurrency,
            requests=len(answers),
            seconds=_rounded(whole),
            tokens_per_s=_rounded(sum(one.tokens for one in answers) / whole),
            latency_p50_s=_part([one.whole_s for one in answers], 0.5),
            latency_p95_s=_part([one.whole_s for one in answers], 0.95),
            first_token_p50_s=_part([one.first_s for one in answers], 0.5),
            first_token_p95_s=_part([one.first_s for one in answers], 0.95),
        )

    async def _ask(self, prompt: int, tokens: int) -> Answer:
        return await self._sent(self._request(prompt, tokens))

    async def _sent(self, request: bytes) -> Answer:
        self.asked += 1
        return await ask(self.target, request, _PATIENCE_S)

    def _request(self, prompt: int, tokens: int) -> bytes:
        most = max(2, self.target.vocabulary * 3 // 4)
        ids = random.choices(range(min(_FIRST, most // 2), most), k=max(1, prompt))  # noqa: S311 - no secret
        return self.target.request(ids, tokens)


async def _together(asked: list[Coroutine[Any, Any, object]]) -> None:
    """All at once. With the first that fails the others are given up: nobody would hear them, and
    the engine would go on with them."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _part(values: list[float], part: float) -> float:
    """The value that so much of all do not exceed."""
    ordered = sorted(values)
    return _rounded(ordered[min(len(ordered) - 1, int(part * len(ordered)))])


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
