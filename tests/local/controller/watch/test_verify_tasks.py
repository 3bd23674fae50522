"""Proofs of models that write no chat: speech, labels, scores."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.controller.watch.engine_client import EngineClient
from gateway.controller.watch.engine_questions import is_alive
from gateway.controller.watch.sound import RATE, form, tone
from gateway.controller.watch.verify import verify
from gateway.diagnosis.facts.learn import learn
from gateway.domain import Failure
from tests.support.makers import attempt, plan
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio

LABELS = b'{"data": [{"label": "a"}, {"label": "b"}]}'


@asynccontextmanager
async def engine(answers: dict[str, tuple[int, bytes]]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """An engine that answers these paths, and all requests that it got."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        requests.append(head + await reader.readexactly(length))
        status, body = answers.get(head.split(b" ")[1].decode(), (404, b"{}"))
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests


async def proof(url: str, task: str, kind: str = "vllm") -> Failure | None:
    model = plan().model.evolve(task=task)
    plan_of_model = plan().evolve(model=model, engine=plan().engine.evolve(kind=kind))
    return await verify(EngineClient(2), url, "m", plan_of_model, 5.0)


async def test_a_speech_model_hears_a_second_of_sound() -> None:
    async with engine({"/v1/audio/transcriptions": (200, b'{"text": ""}')}) as (url, requests):
        assert await proof(url, "transcribe") is None
    (request,) = requests
    assert b"multipart/form-data; boundary=" in request
    assert tone() in request
    assert form("m", tone(), 16) in request
    assert b'name="max_completion_tokens"\r\n\r\n16\r\n' in request


async def test_a_speech_model_that_refuses_sound_is_not_served() -> None:
    async with engine({"/v1/audio/transcriptions": (500, b"broken")}) as (url, _):
        failure = await proof(url, "transcribe")
    assert failure is not None
    assert "500" in failure.message


@pytest.mark.parametrize(
    "words",
    [
        b'{"error": {"message": "Invalid or unsupported audio file.", "code": 400}}',
        b'{"error": {"message": "Please install vllm[audio] for audio support"}}',
    ],
)
async def test_an_engine_without_packages_for_sound_is_planned_no_more_for_speech(
    words: bytes,
) -> None:
    async with engine({"/v1/audio/transcriptions": (400, words)}) as (url, _):
        failure = await proof(url, "transcribe")
    assert failure is not None
    assert (failure.kind, failure.proven_subject) == ("package", "engine")
    assert "vllm[audio]" in failure.advice
    (fact,) = [row for row in learn(attempt(), failure, 0.0) if row.kind == "engine_fails"]
    assert fact.scope["task"] == "transcribe"


@pytest.mark.parametrize(
    ("kind", "path"), [("vllm", "/classify"), ("vllm", "/pooling"), ("sglang", "/v1/classify")]
)
async def test_a_classifier_labels_each_text(kind: str, path: str) -> None:
    async with engine({path: (200, LABELS)}) as (url, _):
        assert await proof(url, "classify", kind) is None


async def test_a_classifier_that_forgets_a_text_is_not_served() -> None:
    async with engine({"/classify": (200, b'{"data": [{}]}')}) as (url, _):
        failure = await proof(url, "classify")
    assert failure is not None
    assert failure.kind == "gibberish"


@pytest.mark.parametrize(
    ("task", "paths"),
    [
        ("embed", ["/v1/embeddings"]),
        ("rerank", ["/v1/rerank"]),
        ("classify", ["/classify", "/pooling"]),
        ("transcribe", ["/v1/audio/transcriptions"]),
        ("generate", ["/metrics", "/v1/completions"]),
    ],
)
async def test_the_smallest_request_is_of_the_task_that_the_model_serves(
    task: str, paths: list[str]
) -> None:
    plan_of_task = plan().evolve(model=plan().model.evolve(task=task))
    async with engine({}) as (url, requests):
        assert await is_alive(EngineClient(2), url, "m", plan_of_task, 5.0)
    texts = [request.split(b" ")[1].decode() for request in requests]
    assert [path for path in texts if path != "/metrics" or task == "generate"] == paths


@asynccontextmanager
async def gathering_engine(at_once: int) -> AsyncIterator[tuple[str, list[bytes]]]:
    """An engine that answers no request before so many have arrived."""
    requests: list[bytes] = []
    complete = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        requests.append(body)
        if len(requests) >= at_once:
            complete.set()
        await complete.wait()
        prompt = json.loads(body)["prompt"]
        prompt_count = len(prompt) if isinstance(prompt[0], list) else 1
        reply_data = json.dumps({"choices": [{"text": "an engine speaks"}] * prompt_count}).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(reply_data), reply_data)
        )
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
        complete.set()
        await asyncio.gather(
            *(each_writer.wait_closed() for each_writer in writers), return_exceptions=True
        )


async def test_independent_proofs_are_asked_at_once() -> None:
    reports: list[str] = []
    times: list[int] = []
    async with gathering_engine(3) as (url, requests):
        failure = await verify(
            EngineClient(8),
            url,
            "m",
            plan(),
            hang_s(),
            reports.append,
            lambda tokens, _: times.append(tokens),
        )
    assert failure is None
    prompts = [json.loads(body)["prompt"] for body in requests]
    short, long, burst = prompts
    assert isinstance(short, str)
    assert times == [len(long)]
    assert isinstance(burst[0], list)
    assert reports[0].startswith("verifying: a short answer, a prompt of ")
    assert reports[0].endswith(" concurrent requests")
    assert len(reports) == 3


async def test_a_plan_that_has_served_shows_no_concurrency_at_its_next_start() -> None:
    reports: list[str] = []
    times: list[int] = []
    verified = plan().evolve(grade="verified")
    async with gathering_engine(2) as (url, requests):
        failure = await verify(
            EngineClient(8),
            url,
            "m",
            verified,
            hang_s(),
            reports.append,
            lambda tokens, _: times.append(tokens),
        )
    assert failure is None
    prompts = [json.loads(body)["prompt"] for body in requests]
    short, long = prompts
    assert isinstance(short, str)
    assert times == [len(long)]
    assert not reports[0].endswith(" concurrent requests")


async def test_a_burst_of_two_ranks_keeps_to_the_prompts_that_a_call_may_have() -> None:
    """vLLM 0.26.0 answers 400 to a call of more than 1,024 prompts."""
    ranks = plan().data_parallel.evolve(value=2)
    seqs = plan().max_num_seqs.evolve(value=1024)
    large = plan().evolve(data_parallel=ranks, max_num_seqs=seqs)
    async with gathering_engine(10) as (url, requests):
        assert await verify(EngineClient(128), url, "m", large, hang_s()) is None
    prompts = [json.loads(body)["prompt"] for body in requests]
    counts = [len(prompt) for prompt in prompts if isinstance(prompt[0], list)]
    assert sum(counts) == large.at_once == 2048
    assert max(counts) <= 1024


async def test_the_first_failed_proof_ends_the_others() -> None:
    async with gathering_engine(4) as (url, requests):
        failure = await verify(EngineClient(8), url, "m", plan(), 0.2)
    assert failure is not None
    assert failure.kind == "verification_failed"
    assert len(requests) == 3


def test_the_tone_is_a_second_of_mono_sound() -> None:
    with wave.open(io.BytesIO(tone())) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getnframes()) == (1, RATE, RATE)
