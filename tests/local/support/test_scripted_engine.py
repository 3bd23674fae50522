"""The pretended engine answers as a real one, and fails as it is told to."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_engine import parse
from tests.support.patience import HANG_S, hang_s
from tests.support.scripted_engine import EngineScript, FakeEngine

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def client_of(**script: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        FakeEngine(EngineScript(**{"model": "m", **script}), lambda line: None) as engine,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{engine.port}", trust_env=False, timeout=HANG_S
        ) as client,
    ):
        yield client


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(f"/v1/{path}", json={"model": "m", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def frames(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    """The data of each server-sent event."""
    response = await client.post(f"/v1/{path}", json={"model": "m", "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-1] == ""
    return [
        (
            event.removeprefix("data: ")
            if "[DONE]" in event
            else json.loads(event.removeprefix("data: "))
        )
        for event in events[:-1]
    ]


async def test_the_engine_answers_health_and_models() -> None:
    async with client_of(max_model_len=123) as client:
        health = await client.get("/health")
        assert (health.status_code, health.content) == (200, b"")
        model = (await client.get("/v1/models")).json()["data"][0]
        assert (model["id"], model["max_model_len"]) == ("m", 123)


@pytest.mark.parametrize(("prompt", "length"), [("three words here", 3), ([5, 6, 7, 8], 4)])
async def test_a_completion_answers_text_and_token_ids(
    prompt: str | list[int], length: int
) -> None:
    async with client_of() as client:
        answer = await post(client, "completions", prompt=prompt, max_tokens=5)
    assert len(answer["choices"][0]["text"].split()) == 5
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": length,
        "completion_tokens": 5,
        "total_tokens": length + 5,
    }


@pytest.mark.parametrize("prompts", [["a", "b c"], [[1], [2, 3]]])
async def test_each_prompt_has_one_choice(prompts: list[Any]) -> None:
    async with client_of() as client:
        answer = await post(client, "completions", prompt=prompts, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


async def test_log_probabilities_are_finite_and_one_per_token() -> None:
    async with client_of() as client:
        answer = await post(client, "completions", prompt="a", max_tokens=3, logprobs=1)
        chat = await post(
            client,
            "chat/completions",
            messages=[{"role": "user", "content": "a"}],
            max_tokens=3,
            logprobs=True,
        )
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 3
    assert len(chat["choices"][0]["logprobs"]["content"]) == 3


async def test_chat_whole_and_streamed_say_the_same() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]
    async with client_of() as client:
        whole = await post(client, "chat/completions", messages=messages, max_tokens=6)
        frames_of_stream = await frames(
            client,
            "chat/completions",
            messages=messages,
            max_completion_tokens=6,
            stream_options={"include_usage": True},
        )
    *chunks, last, end_event = frames_of_stream
    assert end_event == "[DONE]"
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_stream_has_no_usage_unless_it_is_asked_for() -> None:
    async with client_of() as client:
        frames_of_stream = await frames(client, "completions", prompt="a", max_tokens=3)
    assert [frame["choices"][0]["text"] for frame in frames_of_stream[:-1]][-1] == ""
    assert not any("usage" in frame for frame in frames_of_stream[:-1])


async def test_embeddings_differ_and_have_length_one() -> None:
    async with client_of(embed_dim=5) as client:
        answer = await post(client, "embeddings", input=["a", "longer text"])
    first, second = (item["embedding"] for item in answer["data"])
    assert len(first) == len(second) == 5
    assert first != second
    assert sum(x * x for x in first) == pytest.approx(1)


async def test_a_prompt_that_does_not_fit_is_refused_as_vllm_does() -> None:
    async with client_of(max_model_len=8) as client:
        await post(client, "completions", prompt=[1] * 6, max_tokens=2)
        response = await client.post("/v1/completions", json={"prompt": [1] * 7, "max_tokens": 2})
    assert response.status_code == 400
    assert "maximum context length is 8 tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/completions", b"not json", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/chat/completions", b"{}", 400),
        ("POST", "/v1/completions", b'{"model": "other"}', 404),
        ("GET", "/v1/completions", b"", 405),
        ("POST", "/v1/nothing", b"{}", 404),
    ],
)
async def test_a_wrong_request_is_an_error_answer(
    method: str, path: str, content: bytes, status: int
) -> None:
    async with client_of() as client:
        response = await client.request(method, path, content=content)
        assert response.status_code == status
        assert response.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 200


async def test_gibberish_is_one_token_and_empty_is_none() -> None:
    async with client_of(gibberish=True) as client:
        assert (await post(client, "completions", prompt="a", max_tokens=9))["choices"][0][
            "text"
        ] == "!" * 9
    async with client_of(empty=True) as client:
        answer = await post(client, "completions", prompt="a", max_tokens=9)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 0)


async def test_an_engine_that_hangs_still_says_it_is_healthy() -> None:
    async with client_of(hang_after=1) as client:
        await post(client, "completions", prompt="a")
        hanging = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        for _ in range(20):
            assert (await client.get("/health")).status_code == 200
        assert not hanging.done()
        hanging.cancel()


async def test_requests_and_a_client_that_leaves_are_recorded(tmp_path: Path) -> None:
    record = tmp_path / "record"
    async with client_of(record=record, tokens_per_second=50) as client:
        await post(client, "completions", prompt="first", max_tokens=1)
        assert b"closed" not in record.read_bytes()
        async with client.stream(
            "POST", "/v1/completions", json={"prompt": "second", "max_tokens": 4000, "stream": True}
        ) as stream:
            assert "data: " in await anext(stream.aiter_text())
        async with asyncio.timeout(hang_s()):
            while b"\nclosed " not in record.read_bytes():
                await asyncio.sleep(0.01)
    record_bytes = record.read_bytes()
    assert record_bytes.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert (
        record_bytes.index(b'"first"')
        < record_bytes.index(b'"second"')
        < record_bytes.index(b"closed ")
    )


async def test_tokens_come_at_the_pace_asked_for() -> None:
    loop = asyncio.get_running_loop()
    async with client_of(tokens_per_second=100) as client:
        begin_s = loop.time()
        await post(client, "completions", prompt="a", max_tokens=20)
    assert loop.time() - begin_s >= 0.2


async def test_a_client_that_does_not_read_stops_the_stream() -> None:
    async with FakeEngine(
        EngineScript(model="m", max_model_len=1_000_000), lambda line: None
    ) as engine:
        _reader, writer = await asyncio.open_connection("127.0.0.1", engine.port, limit=1024)
        body = json.dumps({"prompt": "a", "max_tokens": 500_000, "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        async with asyncio.timeout(hang_s()):
            while not (engine.connections and not next(iter(engine.connections)).writable.is_set()):
                await asyncio.sleep(0.01)
        assert next(iter(engine.connections)).transport.get_write_buffer_size() < 1_000_000
        writer.close()
        await writer.wait_closed()


def test_the_flags_of_the_fake_engine_become_a_script(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"from a file\n\xff\n")
    lines = [
        "--print",
        "one",
        "--log-file-lines",
        str(tmp_path / "log"),
        "--print=two",
        "--long-line",
        "3",
        "--flood",
        "2",
    ]
    real = [
        "--model=/weights",
        "--served-model-name=m",
        "--host=127.0.0.2",
        "--port=9",
        "--tensor-parallel-size=2",
        "--enforce-eager",
    ]
    script, host, port = parse([*lines, *real, "--spawn-child", "--exit-code", "3"])
    assert (script.model, host, port) == ("m", "127.0.0.2", 9)
    assert [line for _, line in script.lines] == [
        "one",
        "from a file",
        "\udcff",
        "two",
        "xxx",
        "line 0",
        "line 1",
    ]
    assert (script.workers, script.exit_code, script.serve) == (1, 3, True)


@pytest.mark.parametrize("turns", range(4))
async def test_an_engine_that_ends_while_it_is_asked_leaves_no_socket_open(turns: int) -> None:
    """A connection that a client has just made is accepted, in one turn of the loop or another, or
    never."""
    clients = []
    async with FakeEngine(EngineScript(model="m"), lambda line: None) as engine:
        await asyncio.sleep(0)
        for _ in range(5):
            clients.append(client := socket.socket())
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(("127.0.0.1", engine.port))
        for _ in range(turns):
            await asyncio.sleep(0)
    for client in clients:
        client.close()
