"""The gateway's own requests to an engine, by task, and its answers about health, sleep and
metrics."""

from __future__ import annotations

import re
from typing import Any

from gateway.controller.watch.engine_answers import SleepAnswer
from gateway.controller.watch.engine_client import (
    LARGE_BYTES,
    EngineClient,
    EngineResponse,
    NoAnswerError,
)
from gateway.controller.watch.sound import BOUNDARY, form, tone
from gateway.domain import Plan
from gateway.engines.registry import engine_kind

# An engine without this path, or without this task, answers so.
_UNSUPPORTED_STATUSES = (400, 404, 405)
TOKENS = 16
# The fill level of the KV cache in metrics: vLLM 0.33.0 v1/metrics/loggers.py, SGLang 0.5.23
# srt/observability/metrics_collector.py (with --enable-metrics).
CACHE_USAGE = re.compile(rb"^(?:vllm:kv_cache_usage_perc|sglang:token_usage).*$", re.MULTILINE)
OWN_METRICS = re.compile(rb"^(?:vllm|sglang):.*$", re.MULTILINE)
_METRICS_S = 5.0


async def is_alive(client: EngineClient, url: str, name: str, plan: Plan, timeout_s: float) -> bool:
    """Whether the engine works: it answers the smallest request in time, even with an error, or its
    KV cache fills.

    A long prompt takes all tokens of every step, so the smallest request waits for its end.
    """
    usage_before = await _cache_usage(client, url)
    try:
        await _send_smallest(client, url, name, plan, timeout_s)
    except NoAnswerError:
        usage_after = await _cache_usage(client, url)
        return bool(usage_before and usage_after) and usage_after != usage_before
    return True


async def _send_smallest(
    client: EngineClient, url: str, name: str, plan: Plan, timeout_s: float
) -> EngineResponse:
    """The answer to the smallest request of the model's task. Raises NoAnswerError.

    A path of another task is refused before the engine's core hears of it.
    """
    match plan.model.task:
        case "transcribe":
            return await transcribe(client, url, name, timeout_s)
        case "classify":
            return await classify(
                client=client, url=url, name=name, plan=plan, texts=["1"], timeout_s=timeout_s
            )
        case "rerank":
            path = "/v1/rerank"
            body = {"model": name, "query": "1", "documents": ["1"]}
        case "embed":
            path = "/v1/embeddings"
            body = {"model": name, "input": "1"}
        case _:
            # The prompt is a token already, as the tokenizer may be busy with megabytes.
            path = "/v1/completions"
            body = completion_body(name, token_ids(plan, 1, 0), 1)
    return await client.post(f"{url}{path}", body, timeout_s)


async def is_asleep(client: EngineClient, url: str, within_s: float) -> bool:
    """Whether an engine says that it was put to sleep."""
    try:
        answer = await client.get(f"{url}/is_sleeping", within_s)
        return answer.status == 200 and (await answer.read(SleepAnswer)).is_sleeping
    except NoAnswerError:
        return False


async def query_metrics(client: EngineClient, url: str, within_s: float) -> list[bytes] | None:
    """The lines of the engine's own metrics; None if it has none.

    The lines change only with the outputs of the engine's core (vLLM 0.26.0,
    vllm/v1/metrics/loggers.py).
    """
    try:
        answer = await client.get(f"{url}/metrics", within_s, LARGE_BYTES)
    except NoAnswerError:
        return None
    return (OWN_METRICS.findall(answer.body) or None) if answer.status == 200 else None


async def _cache_usage(client: EngineClient, url: str) -> list[bytes]:
    """The metrics lines about the KV cache; empty if there are none."""
    try:
        answer = await client.get(f"{url}/metrics", _METRICS_S, LARGE_BYTES)
    except NoAnswerError:
        return []
    return CACHE_USAGE.findall(answer.body) if answer.status == 200 else []


def token_ids(plan: Plan, count: int, first: int) -> list[int]:
    """Token ids that differ from their neighbours, and stay clear of the ends of the vocabulary,
    where special tokens live."""
    low = min(10, plan.model.vocab // 4)
    high = max(1, plan.model.vocab * 3 // 4)
    return [low + (7919 * (first + position)) % max(1, high - low) for position in range(count)]


def completion_body(
    name: str, prompt: str | list[int] | list[list[int]], tokens: int
) -> dict[str, Any]:
    return {
        "model": name,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
    }


async def classify(
    client: EngineClient, url: str, name: str, plan: Plan, texts: list[str], timeout_s: float
) -> EngineResponse:
    """The engine's answer to texts to classify. Raises NoAnswerError."""
    body = {"model": name, "input": texts}
    path = engine_kind(plan.engine.kind).classify_path
    answer = await client.post(f"{url}{path}", body, timeout_s)
    if answer.status in _UNSUPPORTED_STATUSES:
        answer = await client.post(f"{url}/pooling", body, timeout_s)
    return answer


async def transcribe(client: EngineClient, url: str, name: str, timeout_s: float) -> EngineResponse:
    """The engine's answer to a tone to transcribe. Raises NoAnswerError."""
    path = f"{url}/v1/audio/transcriptions"
    return await client.post_form(path, form(name, tone(), TOKENS), BOUNDARY, timeout_s)
