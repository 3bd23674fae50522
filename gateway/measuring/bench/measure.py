"""The speed of a served model: first tokens of long prompts, a single answer, concurrent answers.

Prompts are random tokens, so no prefix cache helps. All answers have the same length. Each level
keeps its number of concurrent requests until its seconds are over, then waits for the last answers.
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
from gateway.measuring.bench.sentences import text_prompt
from gateway.measuring.bench.streamed_answer import BenchTarget, NoAnswer, TimedAnswer, send_request

_SHORT_PROMPT_TOKENS = 2048
_LONG_PROMPT_TOKENS = 32768
# Tokens of a single answer: the first comes with the prompt, the others show the pace.
_SINGLE_TOKENS = 65
_TRIES = 3
_WARM_UP = 8
_WARM_UP_TOKENS = 16
# Time limit of one answer: a slow engine with hundreds of requests needs minutes.
_PATIENCE_S = 600.0
# Special tokens mostly have the first and the last ids.
_FIRST_ID = 100
# Characters of an English token.
_CHARACTERS = 4


@dataclass
class LoadTest:
    """A load on `target`.

    context: the most tokens of a request.
    report: prints the current step.
    request_count: requests sent.
    sends_text: prompts are sentences, of about as many tokens.
    """

    target: BenchTarget
    context: int
    report: Callable[[str], None] = lambda _: None
    request_count: int = 0
    sends_text: bool = False

    async def measure(self, levels: Sequence[int], seconds: float) -> BenchReport:
        """Measure each number of concurrent requests. Raises NotReady if a request fails."""
        try:
            return await self._measure(levels, seconds)
        except NoAnswer as error:
            raise NotReady(
                f"{self.target.model} gave no answer of the requested length: {error}.",
                hint=(
                    "No result was stored. Look at the engine's log; it must support ignore_eos."
                ),
            ) from None

    async def _measure(self, levels: Sequence[int], seconds: float) -> BenchReport:
        """Measure single requests, a long prompt and each level of concurrency, after a warm-up."""
        prompt_tokens, answer_tokens = lengths(self.context)
        self.report("warming up")
        await _run_all(
            [
                self._timed_answer(min(prompt_tokens, 256), min(answer_tokens, _WARM_UP_TOKENS))
                for _ in range(_WARM_UP)
            ]
        )
        self.report("a single request")
        single_tokens = max(2, min(_SINGLE_TOKENS, self.context // 2))
        single_answers = await self._measure_alone(
            min(_SHORT_PROMPT_TOKENS, self.context - single_tokens), single_tokens, seconds
        )
        long_answers: list[TimedAnswer] = []
        if self.context >= _LONG_PROMPT_TOKENS and not self.sends_text:
            self.report("a prompt of 32k tokens")
            long_answers = await self._measure_alone(
                min(_LONG_PROMPT_TOKENS, self.context - 1), 1, seconds
            )
        levels_measured = []
        for level in levels:
            self.report(f"{level} concurrent")
            levels_measured.append(
                await self._measure_level(level, prompt_tokens, answer_tokens, seconds)
            )
        paces = [
            (answer.tokens - 1) / (answer.whole_s - answer.first_s)
            for answer in single_answers
            if answer.tokens > 1 and answer.whole_s > answer.first_s
        ]
        return BenchReport(
            prompt=prompt_tokens,
            answer=answer_tokens,
            stream=_round_digits(statistics.median(paces)) if paces else None,
            first_token_2k_s=_round_digits(
                statistics.median(answer.first_s for answer in single_answers)
            ),
            first_token_32k_s=(
                _round_digits(statistics.median(answer.first_s for answer in long_answers))
                if long_answers
                else None
            ),
            levels=tuple(levels_measured),
        )

    async def _measure_alone(self, prompt: int, tokens: int, seconds: float) -> list[TimedAnswer]:
        """One or more answers, one after the other."""
        start_s = time.perf_counter()
        answers = list[TimedAnswer]()
        while not answers or (len(answers) < _TRIES and time.perf_counter() - start_s < seconds):
            answers.append(await self._timed_answer(prompt, tokens))
        return answers

    async def _measure_level(
        self, concurrency: int, prompt_tokens: int, answer_tokens: int, seconds: float
    ) -> BenchLevel:
        """Keep `concurrency` requests in flight for `seconds`, and measure their answers."""
        first = [self._request(prompt_tokens, answer_tokens) for _ in range(concurrency)]
        start_s = time.perf_counter()
        answers = list[TimedAnswer]()

        async def stream(request: bytes) -> None:
            answers.append(await self._send(request))
            while time.perf_counter() - start_s < seconds:
                answers.append(await self._timed_answer(prompt_tokens, answer_tokens))

        await _run_all([stream(request) for request in first])
        total_s = time.perf_counter() - start_s
        return BenchLevel(
            concurrency=concurrency,
            requests=len(answers),
            seconds=_round_digits(total_s),
            tokens_per_s=_round_digits(sum(answer.tokens for answer in answers) / total_s),
            latency_p50_s=_quantile([answer.whole_s for answer in answers], 0.5),
            latency_p95_s=_quantile([answer.whole_s for answer in answers], 0.95),
            first_token_p50_s=_quantile([answer.first_s for answer in answers], 0.5),
            first_token_p95_s=_quantile([answer.first_s for answer in answers], 0.95),
        )

    async def _timed_answer(self, prompt: int, tokens: int) -> TimedAnswer:
        return await self._send(self._request(prompt, tokens))

    async def _send(self, request: bytes) -> TimedAnswer:
        self.request_count += 1
        return await send_request(self.target, request, _PATIENCE_S)

    def _request(self, prompt: int, tokens: int) -> bytes:
        if self.sends_text:
            # A token has one character at least, so the prompt fits whatever the tokenizer is.
            characters = min(_CHARACTERS * prompt, self.context - tokens)
            return self.target.request(text_prompt(characters), tokens)
        id_limit = max(2, self.target.vocabulary * 3 // 4)
        token_ids = range(min(_FIRST_ID, id_limit // 2), id_limit)
        ids = random.choices(token_ids, k=max(1, prompt))  # noqa: S311 - no secret
        return self.target.request(ids, tokens)


async def _run_all(requests: list[Coroutine[Any, Any, object]]) -> None:
    """Run requests concurrently. The first failure cancels the others, so that the engine stops
    working on them."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _quantile(values: list[float], share: float) -> float:
    """The value that this share of all values does not exceed."""
    ordered_values = sorted(values)
    return _round_digits(
        ordered_values[min(len(ordered_values) - 1, int(share * len(ordered_values)))]
    )


def _round_digits(value: float) -> float:
    return float(f"{value:.4g}")
