"""A load on real sockets: its figures of an engine with a scripted pace, and of one that does not
answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.domain import BenchReport
from gateway.errors import NotReady
from gateway.measuring.bench.measure import LoadTest
from gateway.measuring.bench.streamed_answer import BenchTarget
from tests.support.dataplane import Gateway, model, until
from tests.support.scripted_engine import EngineScript, FakeEngine

pytestmark = pytest.mark.anyio


async def measure(
    script: EngineScript, *levels: int, seconds: float = 0.1, context: int = 400
) -> tuple[BenchReport, LoadTest, FakeEngine]:
    async with FakeEngine(script, lambda _: None) as engine:
        with Gateway() as gateway:
            gateway.routes.table = type(gateway.routes.table)(
                {"m": model(f"http://127.0.0.1:{engine.port}")}
            )
            load = LoadTest(BenchTarget(gateway.url, "m", vocabulary=500), context)
            try:
                return await load.measure(levels, seconds), load, engine
            finally:
                # The gateway is waited for in this loop, which has to close the sockets that the
                # load has let go of.
                await until(lambda: not gateway.plane.connections)


async def test_the_bench_finds_the_pace_of_the_engine_and_asks_for_whole_answers() -> None:
    report, load, engine = await measure(EngineScript(model="m", tokens_per_second=200), 1, 4)
    assert report.stream is not None
    # The engine never goes faster than its script; a delay of the first token alone leaves the
    # others less time.
    assert 0 < report.stream <= 240
    first_level, four = report.levels
    assert (first_level.concurrency, four.concurrency) == (1, 4)
    assert four.requests >= 4
    assert first_level.tokens_per_s <= 200
    assert four.tokens_per_s <= 800
    assert (report.prompt, report.answer) == (320, 80)
    assert first_level.first_token_p50_s < first_level.latency_p50_s <= first_level.latency_p95_s
    assert first_level.latency_p50_s >= 79 / 200
    assert load.request_count == engine.requests
    assert report.first_token_32k_s is None


async def test_a_long_context_gets_a_long_prompt() -> None:
    report, _, _ = await measure(EngineScript(model="m", max_model_len=33_000), 1, context=33_000)
    assert report.first_token_32k_s is not None
    assert report.first_token_2k_s is not None


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (EngineScript(model="m", max_model_len=8), "maximum context length is 8"),
        # The others of those that ask at once would wait for ever: they are given up with the first
        # that fails.
        (EngineScript(model="m", max_model_len=8, hang_after=1), "maximum context length is 8"),
        (EngineScript(model="other"), "does not exist"),
        (EngineScript(model="m", crash_prompt=1), "status 502"),
    ],
)
async def test_an_engine_that_does_not_answer_is_reported_with_its_words(
    script: EngineScript, words: str
) -> None:
    with pytest.raises(NotReady, match=words):
        await measure(script, 1)


async def test_sentences_are_asked_where_drafted_tokens_are_compared(tmp_path: Path) -> None:
    record = tmp_path / "requests"
    script = EngineScript(model="m", record=record)
    async with FakeEngine(script, lambda _: None) as engine:
        target = BenchTarget(f"http://127.0.0.1:{engine.port}", "m")
        report = await LoadTest(target, 400, sends_text=True).measure([1], 0.1)
    prompts = re.findall(r'"prompt": ("[^"]+"|\[)', record.read_text())
    assert prompts
    assert all(prompt.startswith('"') for prompt in prompts)
    # Every character may be a token, and the answer has its place.
    assert max(map(len, prompts)) <= 400
    assert report.levels[0].requests >= 1
