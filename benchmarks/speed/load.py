"""One load on an OpenAI completions API, as one line of JSON.

    python load.py CORES PORT CONCURRENCY REQUESTS TOKENS_IN TOKENS_OUT SEED VOCABULARY

Prompts are random tokens, so no cache helps. Answers are streamed and have TOKENS_OUT tokens each.
Several processes send requests, and each starts when all prompts are made, so that the client is
not measured. Only the standard library.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

PROCESSES = 4
# Streams above which a load has PROCESSES processes.
ONE_PROCESS = 16
LIMIT_S = 120


class Answer(NamedTuple):
    """The times of the first token and of the end, in seconds after the question; or the reason
    why the engine gave none."""

    first_s: float = 0
    whole_s: float = 0
    tokens: int = 0
    error: str = ""


async def ask(port: int, prompt: list[int], tokens_out: int) -> Answer:
    body = json.dumps(
        {"model": "m", "prompt": prompt, "max_tokens": tokens_out, "ignore_eos": True,
            "temperature": 0, "stream": True,
         "stream_options": {"include_usage": True}}
    ).encode()  # fmt: skip
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type:"
        f" application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    began = time.perf_counter()
    first, heard = 0.0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        while chunk := await reader.read(1 << 16):
            heard = heard[-2000:] + chunk
            if not first and b'"text"' in heard:
                first = time.perf_counter() - began
    finally:
        writer.close()
    whole = time.perf_counter() - began
    _, mark, rest = heard.rpartition(b'"completion_tokens":')
    if not (first and mark and b"[DONE]" in rest):
        return Answer(
            error=heard[-300:].decode(errors="replace")
            or "the connection was closed without an answer"
        )
    return Answer(first, whole, int(rest.split(b",")[0].split(b"}")[0]))


async def client(
    port: int, concurrency: int, prompts: list[list[int]], tokens_out: int
) -> list[Answer]:
    """Each stream asks again as soon as it has its answer."""
    left = iter(prompts)
    answers = []

    async def stream() -> None:
        for prompt in left:
            try:
                answers.append(await asyncio.wait_for(ask(port, prompt, tokens_out), LIMIT_S))
            except (OSError, TimeoutError) as error:
                answers.append(Answer(error=repr(error)))

    await asyncio.gather(*(stream() for _ in range(concurrency)))
    return answers


def process(
    wait: Callable[[], Any],
    results: Any,
    port: int,
    concurrency: int,
    seed: int,
    shape: tuple[int, int, int, int],
) -> None:
    requests, tokens_in, tokens_out, vocabulary = shape
    numbers = random.Random(seed)
    prompts = [
        [numbers.randrange(100, vocabulary) for _ in range(tokens_in)] for _ in range(requests)
    ]
    wait()
    began = time.time()
    answers = asyncio.run(client(port, concurrency, prompts, tokens_out))
    results.put((began, time.time(), [tuple(answer) for answer in answers]))


def equal_shares(whole: int, parts: int) -> list[int]:
    return [whole // parts + (number < whole % parts) for number in range(parts)]


def measure(
    port: int,
    concurrency: int,
    requests: int,
    tokens_in: int,
    tokens_out: int,
    seed: int,
    vocabulary: int,
) -> dict[str, Any]:
    parts = PROCESSES if concurrency > ONE_PROCESS else 1
    context = multiprocessing.get_context("fork")
    results, barrier = context.Queue(), context.Barrier(parts)
    children = [
        context.Process(target=process, args=(barrier.wait, results, port, streams,
            seed * 100 + number, (asked, tokens_in, tokens_out, vocabulary)))
        for number, (streams, asked) in enumerate(zip(equal_shares(concurrency, parts),
            equal_shares(requests, parts), strict=True))
    ]  # fmt: skip
    for child in children:
        child.start()
    found = [results.get() for _ in children]
    for child in children:
        child.join()
    seconds = max(end for _, end, _ in found) - min(began for began, _, _ in found)
    answers = [Answer(*one) for _, _, part in found for one in part]
    return figures(answers, seconds)


def figures(answers: list[Answer], seconds: float) -> dict[str, Any]:
    good = [answer for answer in answers if not answer.error]
    said: dict[str, Any] = {
        "answers": len(good),
        "errors": len(answers) - len(good),
        "seconds": round(seconds, 3),
    }
    if wrong := next((each_answer.error for each_answer in answers if each_answer.error), ""):
        said["error"] = wrong
    if not good:
        return said
    said["tokens_s"] = round(sum(one.tokens for one in good) / seconds, 1)
    said["ttft_ms"] = round(1000 * statistics.median(one.first_s for one in good), 2)
    said["ttft_most_ms"] = round(1000 * max(one.first_s for one in good), 2)
    if several := [
        1000 * (one.whole_s - one.first_s) / (one.tokens - 1) for one in good if one.tokens > 1
    ]:
        said["tpot_ms"] = round(statistics.median(several), 3)
    return said


if __name__ == "__main__":
    os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
    print(json.dumps(measure(*map(int, sys.argv[2:]))))
