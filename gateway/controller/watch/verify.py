"""Proves that an engine generates, with a short answer, a full prefill batch, and the planned
concurrency.

A plan that has shown its concurrency here before need not show it again at each start: requests of
that batch took half a second of a start of 15 s (an 8B on one H200, vLLM 0.26.0).

Tests of features follow (`ability_tests.py`). A missing feature does not prevent serving.

A healthy engine may still crash at its first long prompt or first large batch, or repeat one token
for ever. So nothing is routed before this proof.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gateway.controller.watch.engine_answers import (
    Completion,
    CompletionLogprobs,
    EmbeddingAnswer,
    LabelAnswer,
    RankingAnswer,
    TranscriptionAnswer,
)
from gateway.controller.watch.engine_client import (
    EngineClient,
    EngineResponse,
    NoAnswerError,
)
from gateway.controller.watch.engine_questions import (
    TOKENS,
    classify,
    completion_body,
    token_ids,
    transcribe,
)
from gateway.domain import AdapterRef, Failure, Plan
from gateway.engines.registry import engine_kind

T = TypeVar("T")
# A request for a completion of these prompts with this many tokens.
_Ask = Callable[[str | list[int] | list[list[int]], int], Coroutine[Any, Any, "Completion"]]


# Two unrelated beginnings: a model may legitimately repeat itself after one of them.
PROMPTS = ("The quick brown fox", "Once upon a time there was")
BURST_PROMPT = 16
BURST_TOKENS = 4
# Prompts of one call: vLLM 0.26.0 takes at most 1,024 (VLLM_MAX_COMPLETION_PROMPTS).
CALL_PROMPTS = 256
# The answer to a well-formed file where no package reads sound: load_audio in
# vllm/multimodal/media/audio.py of 0.26.0, and its caller in vllm/entrypoints/speech_to_text.
DEAF = re.compile(r"unsupported audio file|\[audio\]", re.IGNORECASE)


class _ProofFailedError(Exception):
    def __init__(self, kind: str, message: str, line: str | None = None, **culprit: Any) -> None:
        super().__init__(message)
        advice = "Another engine version or a plan without special kernels may do better."
        self.failure = Failure(
            kind=kind,
            phase="verifying",
            message=message,
            line=line,
            **{"advice": advice, **culprit},
        )


async def verify(
    client: EngineClient,
    url: str,
    name: str,
    plan: Plan,
    timeout_s: float,
    report: Callable[[str], None] = lambda _: None,
    on_measured: Callable[[int, float], None] = lambda *_: None,
) -> Failure | None:
    """None if the engine at `url` (without /v1) serves `name` as planned; otherwise the failure.

    `on_measured` is called with the tokens of a prompt and its seconds.
    """
    try:
        probe = _OTHER_TASKS.get(plan.model.task)
        if probe is not None:
            await probe(client, url, name, plan, timeout_s)
        else:
            await _generates(
                client=client,
                url=url,
                name=name,
                plan=plan,
                timeout_s=timeout_s,
                report=report,
                on_measured=on_measured,
            )
    except _ProofFailedError as refuted:
        return refuted.failure
    return None


async def _generates(
    client: EngineClient,
    url: str,
    name: str,
    plan: Plan,
    timeout_s: float,
    report: Callable[[str], None],
    on_measured: Callable[[int, float], None],
) -> None:
    """Ask for a short answer, a full prefill batch and the planned concurrency, all concurrently.
    A verified plan has shown the last before. Raises _ProofFailedError unless all succeed."""

    async def complete(prompt: str | list[int] | list[list[int]], tokens: int) -> Completion:
        body = completion_body(name, prompt, tokens)
        return await _post_json(client, f"{url}/v1/completions", body, timeout_s, Completion)

    context = plan.max_model_len.value
    proofs = {"a short answer": _writes(complete, context)}
    long_length = min(plan.max_num_batched_tokens.value, context - 2)
    if long_length > 0:
        proofs[f"a prompt of {long_length} tokens"] = _measure_prompt(
            complete, token_ids(plan, long_length, 0), on_measured
        )
    burst_size, length = _burst(plan)
    if burst_size > 1 and plan.grade != "verified":
        prompts = [token_ids(plan, length, first) for first in range(burst_size)]
        proofs[f"{burst_size} concurrent requests"] = _check_batches(complete, prompts)
    for adapter in plan.adapters:
        proofs[f"the adapter {adapter.name}"] = _adapts(
            client=client, url=url, name=name, plan=plan, adapter=adapter, timeout_s=timeout_s
        )
    await _gather_proofs(proofs, report)


async def _gather_proofs(
    proofs: dict[str, Coroutine[Any, Any, None]], report: Callable[[str], None]
) -> None:
    """Run the proofs concurrently, and report those without an end yet.

    Raises the first _ProofFailedError, which ends the others.
    """
    pending = dict.fromkeys(proofs)

    def show() -> None:
        report(f"verifying: {', '.join(pending)}")

    async def run(text: str, proof: Coroutine[Any, Any, None]) -> None:
        await proof
        del pending[text]
        if pending:
            show()

    show()
    tasks = [asyncio.ensure_future(run(*item)) for item in proofs.items()]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _writes(ask: _Ask, context: int) -> None:
    """Check that one of two beginnings is continued by text. Raises _ProofFailedError."""
    tokens = min(TOKENS, max(1, context // 2))
    problems = []
    for prompt in PROMPTS:
        # A byte-level tokenizer makes one token of each character; a tiny context holds only the
        # first of them.
        beginning = prompt if tokens + len(prompt) <= context else prompt[:1]
        problem = degeneration_reason(await ask(beginning, tokens))
        if problem is None:
            return
        problems.append(problem)
    raise _ProofFailedError(
        "gibberish",
        f"The engine answers, but its output is not text: {problems[0]}.",
        problems[0],
    )


async def _measure_prompt(
    ask: _Ask, prompt: list[int], on_measured: Callable[[int, float], None]
) -> None:
    start_s = time.monotonic()
    await ask(prompt, 2)
    on_measured(len(prompt), time.monotonic() - start_s)


async def _check_batches(ask: _Ask, prompts: list[list[int]]) -> None:
    # To the engine one call with many prompts is as many requests.
    calls = [prompts[i : i + CALL_PROMPTS] for i in range(0, len(prompts), CALL_PROMPTS)]
    answers = await asyncio.gather(*(ask(call, BURST_TOKENS) for call in calls))
    count = sum(len(answer.choices) for answer in answers)
    if count != len(prompts):
        raise _ProofFailedError(
            "gibberish",
            f"Asked for {len(prompts)} concurrent answers, the engine gave {count}.",
        )


async def _adapts(
    client: EngineClient, url: str, name: str, plan: Plan, adapter: AdapterRef, timeout_s: float
) -> None:
    """Check that the adapter answers. Raises _ProofFailedError."""
    served_as = engine_kind(plan.engine.kind).adapter_name(name, adapter.name)
    body = completion_body(served_as, PROMPTS[0][:1], BURST_TOKENS)
    answer = await _post_json(client, f"{url}/v1/completions", body, timeout_s, Completion)
    if not answer.choices or not answer.choices[0].text:
        raise _ProofFailedError("gibberish", f"The adapter {adapter.name} gives an empty answer.")


def _burst(plan: Plan) -> tuple[int, int]:
    """The number of requests, and their tokens, that show the planned concurrency within the KV
    cache."""
    context = plan.max_model_len.value
    seqs = plan.at_once
    groups = plan.data_parallel.value
    length = max(1, min(BURST_PROMPT, context - BURST_TOKENS))
    fitting_requests = plan.memory.kv_tokens // (length + BURST_TOKENS) * groups
    count = fitting_requests if plan.memory.kv_tokens else seqs
    return max(1, min(seqs, count)), length


def degeneration_reason(answer: Completion) -> str | None:
    """Why a completion is not text: empty, one token repeated, or infinite log probabilities; None
    if it is."""
    if not answer.choices:
        return "the answer has no choices"
    choice = answer.choices[0]
    text = choice.text
    logprobs = choice.logprobs or CompletionLogprobs()
    if not text:
        return "the text is empty"
    if text.strip("\ufffd") == "":
        return "the text is not valid UTF-8"
    if not all(number is None or math.isfinite(number) for number in logprobs.token_logprobs or ()):
        return "the log probabilities are not finite"
    tokens = logprobs.tokens or list(text)
    if len(tokens) >= TOKENS // 2 and len(set(tokens)) == 1:
        return f"one token is repeated: {text[:40]!r}"
    return None


async def _check_embeddings(
    client: EngineClient, url: str, name: str, _: Plan, timeout_s: float
) -> None:
    answer = await _post_json(
        client,
        f"{url}/v1/embeddings",
        {"model": name, "input": list(PROMPTS)},
        timeout_s,
        EmbeddingAnswer,
    )
    vectors = [embedding.embedding for embedding in answer.data]
    if (
        len(vectors) != len(PROMPTS)
        or not all(vectors)
        or len({len(vector) for vector in vectors}) != 1
    ):
        raise _ProofFailedError(
            "gibberish", "The engine does not give one embedding of one size for each input."
        )
    if not all(math.isfinite(number) for vector in vectors for number in vector):
        raise _ProofFailedError("gibberish", "The embeddings are not finite numbers.")
    if vectors[0] == vectors[1] or not any(vectors[0]):
        raise _ProofFailedError("gibberish", "Different inputs get the same embedding.")


async def _classifies(
    client: EngineClient, url: str, name: str, plan: Plan, timeout_s: float
) -> None:
    """Check that the model labels texts, or tokens of texts (/pooling of vLLM). Raises
    _ProofFailedError."""
    try:
        answer = await classify(
            client=client, url=url, name=name, plan=plan, texts=list(PROMPTS), timeout_s=timeout_s
        )
    except NoAnswerError as error:
        raise _ProofFailedError(
            "verification_failed", f"The engine failed during its verification: it {error}."
        ) from None
    labels = await _read_answer(_check_status(answer), LabelAnswer)
    if len(labels.data) != len(PROMPTS):
        raise _ProofFailedError("gibberish", "The engine does not give one answer for each input.")


async def _transcribes(
    client: EngineClient, url: str, name: str, plan: Plan, timeout_s: float
) -> None:
    """Check that the model answers a second of sound. A tone may have no words. Raises
    _ProofFailedError."""
    try:
        answer = await transcribe(client, url, name, timeout_s)
    except NoAnswerError as error:
        raise _ProofFailedError(
            "verification_failed", f"The engine failed during its verification: it {error}."
        ) from None
    if answer.status != 200 and DEAF.search(answer.excerpt):
        raise _ProofFailedError(
            "package",
            "The engine cannot read sound: its environment lacks the packages soundfile and av.",
            answer.excerpt,
            advice=(
                "Install them with the engine (`pip install 'vllm[audio]'`), or choose an image"
                " that has them (--image)."
            ),
            proves="engine",
            culprit={"task": plan.model.task},
        )
    await _read_answer(_check_status(answer), TranscriptionAnswer)


async def _check_ranking(
    client: EngineClient, url: str, name: str, _: Plan, timeout_s: float
) -> None:
    body = {"model": name, "query": PROMPTS[0], "documents": [PROMPTS[0], PROMPTS[1]]}
    answer = await _post_json(client, f"{url}/v1/rerank", body, timeout_s, RankingAnswer)
    scores = [result.relevance_score for result in answer.results]
    if len(scores) != len(PROMPTS) or not all(math.isfinite(score) for score in scores):
        raise _ProofFailedError(
            "gibberish", "The engine does not give one finite score for each document."
        )
    if scores[0] == scores[1]:
        raise _ProofFailedError("gibberish", "Different documents get the same score.")


async def _post_json(
    client: EngineClient, url: str, body: dict[str, Any], timeout_s: float, kind: type[T]
) -> T:
    try:
        answer = await client.post(url, body, timeout_s)
    except NoAnswerError as error:
        raise _ProofFailedError(
            "verification_failed", f"The engine failed during its verification: it {error}."
        ) from None
    return await _read_answer(_check_status(answer), kind)


def _check_status(answer: EngineResponse) -> EngineResponse:
    if answer.status != 200:
        text = answer.excerpt
        raise _ProofFailedError(
            "verification_failed",
            f"The engine answered {answer.status} to a plain request: {text}",
            text,
        )
    return answer


_OTHER_TASKS = {
    "embed": _check_embeddings,
    "rerank": _check_ranking,
    "classify": _classifies,
    "transcribe": _transcribes,
}


async def _read_answer(answer: EngineResponse, kind: type[T]) -> T:
    try:
        return await answer.read(kind)
    except NoAnswerError as error:
        raise _ProofFailedError("gibberish", f"The engine {error}.", answer.excerpt) from None
