"""Ollama's API over a socket, as its own clients speak it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.domain import LaunchSpec
from gateway.proxy import inner_answer
from gateway.proxy.limits import SWEEP_S
from tests.support.patience import hang_s, wait_until
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "Hello"}]


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


async def serve(gateway: Running, folder: Path) -> None:
    await gateway.add("m", model_folder(folder / "model"))
    await gateway.until("m", "ready")


async def ask(client: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> Any:
    """The last line of the answer."""
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return json.loads(answer.text.splitlines()[-1])


async def test_models_answer_by_chat_and_by_prompt(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await serve(gateway, tmp_path)
        client = gateway.client
        limit = {"num_predict": 8, "temperature": 0}
        whole = await ask(
            client, "/api/chat", model="m:latest", messages=MESSAGES, stream=False, options=limit
        )
        assert whole["message"]["role"] == "assistant"
        assert len(whole["message"]["content"].split()) == whole["eval_count"] == 8
        assert (whole["done"], whole["done_reason"], whole["model"]) == (True, "length", "m:latest")
        answer = await client.post(
            "/api/chat", json={"model": "m", "messages": MESSAGES, "options": limit}
        )
        assert answer.headers["content-type"] == "application/x-ndjson"
        *lines, last = map(json.loads, answer.text.splitlines())
        text = "".join(line["message"]["content"] for line in lines)
        assert text == whole["message"]["content"]
        assert not any(line["done"] for line in lines)
        assert (last["eval_count"], last["message"]["content"]) == (8, "")
        for raw in (False, True):
            last = await ask(client, "/api/generate", model="m", prompt="Why?", raw=raw)
            assert (last["done"], last["response"]) == (True, "")
        assert (await ask(client, "/api/generate", model="m"))["done_reason"] == "load"
        # Metered as requests of /v1.
        (row,) = (await client.get("/admin/usage")).json()["data"]
        assert (row["model"], row["requests"]) == ("m", 5)


async def test_a_model_with_a_tag_is_known_without_it(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), aliases=["bert:latest"])
        await gateway.until("m", "ready")
        for name in ("bert", "bert:latest"):
            document = await ask(gateway.client, "/api/show", model=name)
            assert "completion" in document["capabilities"]


async def test_models_are_listed_and_shown(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await serve(gateway, tmp_path)
        client = gateway.client
        for path in ("/api/tags", "/api/ps"):
            (row,) = (await client.get(path)).json()["models"]
            assert (row["name"], row["details"]["format"]) == ("m", "safetensors")
        document = await ask(client, "/api/show", model="m:latest")
        assert "completion" in document["capabilities"]
        assert document["model_info"]["llama.context_length"] == row["context_length"]
        assert document["details"]["family"] == "llama"
        assert document["details"]["parameter_size"] == "1.4M"
        assert document["details"]["quantization_level"] == "BF16"
        # The engine of this test has no GPU.
        assert (row["size"] > 0, row["size_vram"], row["expires_at"] > "2100") == (True, 0, True)
        assert (await client.get("/api/version")).json()["version"]
        for path in ("/", "/api/tags", "/api/version"):
            head = await client.head(path)
            assert (head.status_code, head.content) == (200, b"")
        await client.post("/admin/models/m/stop")
        await gateway.until("m", "stopped")
        assert (await client.get("/api/ps")).json()["models"] == []


async def test_a_model_that_is_here_is_pulled_at_once(tmp_path: Path) -> None:
    """Clients pull before the first request."""
    async with running(tmp_path, healthy) as gateway:
        await serve(gateway, tmp_path)
        for name in ("m", "m:latest"):
            answer = await gateway.client.post("/api/pull", json={"model": name})
            assert answer.headers["content-type"] == "application/x-ndjson"
            statuses = [json.loads(line)["status"] for line in answer.text.splitlines()]
            assert statuses == ["pulling manifest", "success"]
        whole = await ask(gateway.client, "/api/pull", model="m", stream=False)
        assert whole == {"status": "success"}


async def test_the_lists_of_lm_studio_are_answered(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await serve(gateway, tmp_path)
        document = (await gateway.client.get("/api/v0/models")).json()
        (row,) = document["data"]
        assert (row["id"], row["state"], row["arch"]) == ("m", "loaded", "llama")
        assert (await gateway.client.get("/api/v0/models/m")).json() == row
        for path in ("/api/v0/models/nosuch", "/api/v0/models/"):
            assert (await gateway.client.get(path)).status_code == 404
        answer = await ask(gateway.client, "/api/v0/chat/completions", model="m", messages=MESSAGES)
        assert answer["choices"][0]["message"]["content"]
        pointer = await ask(gateway.client, "/api/v0/responses", 404, model="m")
        assert "/v1" in str(pointer["error"])


async def test_vectors_come_in_the_order_of_their_texts(tmp_path: Path) -> None:
    """The requests of Ollama's Python client, LangChain and LlamaIndex, which send fields of their
    own: options, keep_alive, truncate."""
    async with running(tmp_path, healthy) as gateway:
        folder = model_folder(tmp_path / "model")
        kind = "sentence_transformers.models.Transformer"
        (folder / "modules.json").write_text(
            json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}])
        )
        await gateway.add("e", folder)
        await gateway.until("e", "ready")
        client = gateway.client
        document = await ask(client, "/api/show", model="e")
        assert document["capabilities"] == ["embedding"]
        fields: dict[str, Any] = {"options": {"num_ctx": 2048}, "keep_alive": "5m"}
        fields["truncate"] = True
        texts = ["a", "a longer text", "a"]
        whole = await ask(client, "/api/embed", model="e:latest", input=texts, **fields)
        assert (whole["model"], len(whole["embeddings"])) == ("e:latest", 3)
        first, second, third = whole["embeddings"]
        assert first == third != second
        assert whole["prompt_eval_count"] > 0
        (single,) = (await ask(client, "/api/embed", model="e", input="a"))["embeddings"]
        assert single == first
        old = await ask(client, "/api/embeddings", model="e", prompt="a", **fields)
        assert old == {"embedding": first}
        no_texts: tuple[Any, ...] = ([], "")
        for no_text in no_texts:
            empty = await ask(client, "/api/embed", model="e", input=no_text)
            assert (empty["model"], empty["embeddings"]) == ("e", [])
        await ask(client, "/api/embed", 404, model="nosuch", input=[])
        chat = await ask(client, "/api/chat", 400, model="e", messages=MESSAGES)
        assert chat["error"]


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
async def test_keep_alive_of_zero_unloads_a_model(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, healthy) as gateway:
        await serve(gateway, tmp_path)
        answer = await ask(gateway.client, path, model="m:latest", keep_alive=0)
        assert (answer["done"], answer["done_reason"]) == (True, "unload")
        await gateway.until("m", "stopped")


async def test_a_key_for_inference_unloads_no_model(tmp_path: Path) -> None:
    async with running(
        tmp_path, healthy, admin_key="admin-key-1", api_key="client-key-1"
    ) as gateway:
        gateway.client.headers["authorization"] = "Bearer admin-key-1"
        await serve(gateway, tmp_path)
        answer = await gateway.client.post(
            "/api/generate",
            json={"model": "m", "keep_alive": 0},
            headers={"authorization": "Bearer client-key-1"},
        )
        assert answer.status_code == 403, answer.text
        assert list(answer.json()) == ["error"]
        assert (await gateway.show("m"))["state"] == "ready"


async def test_refusals_have_the_form_of_ollama(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await serve(gateway, tmp_path)
        client = gateway.client
        error = await ask(client, "/api/chat", 404, model="nosuch", messages=MESSAGES)
        assert "'nosuch' does not exist here" in error["error"]
        kind = await ask(client, "/api/embed", 400, model="m", input="x")
        assert "generates text" in kind["error"]
        error = await ask(client, "/api/pull", 404, model="nosuch")
        assert "fitserve add NAME SOURCE" in error["error"]
        error = await ask(client, "/api/generate", 404, model="nosuch", keep_alive=0)
        assert "nosuch" in error["error"]
        for wrong in (b"", b"[", b"[]", b"{}", b'{"model": 1}', b"[" * 100_000):
            answer = await client.post("/api/chat", content=wrong)
            assert (answer.status_code, list(answer.json())) == (400, ["error"])
        wrong_fields: tuple[dict[str, Any], ...] = (
            {"messages": "x"},
            {"messages": ["x"]},
            {"messages": MESSAGES, "options": 1},
            {"messages": MESSAGES, "format": "yaml"},
            {"messages": [{"role": "user", "images": ["%"]}]},
            {"messages": [{"role": "assistant", "tool_calls": [1]}]},
        )
        for fields in wrong_fields:
            await ask(client, "/api/chat", 400, model="m", **fields)
        # Some depths can be read, and not be written again.
        for depth in range(900, 1000):
            deep = b'{"model": "nosuch", "messages": [{"role": "assistant", "content": ' + (
                b"[" * depth + b"]" * depth + b"}]}"
            )
            answer = await client.post("/api/chat", content=deep)
            assert answer.status_code in (400, 404), depth
        assert await ask(client, "/api/chat", name="m", messages=MESSAGES)
        answer = await client.get("/api/chat")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        # Pages of other sites reach no gateway without keys.
        for headers in ({"origin": "http://other.example"}, {"host": "other.example"}):
            body = {"model": "m", "messages": MESSAGES}
            assert (await client.post("/api/chat", json=body, headers=headers)).status_code == 403
            assert (await client.get("/api/tags", headers=headers)).status_code == 403


async def test_keys_and_their_limits_hold(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await serve(gateway, tmp_path)
        response = await gateway.client.post(
            "/admin/keys", json={"name": "me", "scopes": ["admin"]}
        )
        admin = {"authorization": f"Bearer {response.json()['key']}"}
        for path in ("/api/tags", "/api/ps", "/api/version"):
            assert (await gateway.client.get(path)).status_code == 401
        error = await ask(gateway.client, "/api/chat", 401, model="m", messages=MESSAGES)
        assert "key" in error["error"]
        limits = {"name": "app", "scopes": ["inference"], "requests_per_minute": 2}
        response = await gateway.client.post("/admin/keys", json=limits, headers=admin)
        async with httpx.AsyncClient(
            base_url=gateway.url,
            headers={"authorization": f"Bearer {response.json()['key']}"},
            trust_env=False,
            timeout=hang_s(),
        ) as client:
            body = {"model": "m", "messages": MESSAGES}
            statuses = [(await client.post("/api/chat", json=body)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]


async def test_a_stranger_is_refused_before_the_body_is_read(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, admin_key="a" * 40) as gateway:
        address, _, port = gateway.url.removeprefix("http://").partition(":")
        for path in ("chat", "pull", "nosuch"):
            reader, writer = await asyncio.open_connection(address, int(port))
            # The body never comes.
            head = f"POST /api/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n"
            writer.write(head.encode())
            assert b" 401 " in await reader.readline()
            writer.close()


async def test_a_call_takes_the_place_of_one_connection(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, max_connections_per_address=1) as gateway:
        for _ in range(3):
            assert (await gateway.client.get("/api/tags")).status_code == 200


async def test_pages_of_named_origins_may_read_refusals(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, origins="http://page.example") as gateway:
        headers = {"origin": "http://page.example"}
        for path in ("/api/tags", "/api/nosuch", "/api/chat"):
            answer = await gateway.client.get(path, headers=headers)
            assert answer.headers["access-control-allow-origin"] == "http://page.example"


@pytest.mark.parametrize("path", ["/api/chat", "/api/embed"])
async def test_an_answer_of_another_form_is_a_fault_of_the_engine(
    tmp_path: Path, path: str
) -> None:
    """An engine elsewhere that answers any JSON."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (
                int(line.split(b":")[1])
                for line in request.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            ),
            0,
        )
        await reader.readexactly(length)
        body = (
            b'{"data": [{"id": "m"}]}'
            if request.startswith(b"GET")
            else b'{"data": 5, "choices": [7]}'
        )
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    async with server, running(tmp_path, healthy) as gateway:
        wish = {"name": "m", "endpoint": f"http://127.0.0.1:{port}/v1"}
        response = await gateway.client.post("/admin/models", json=wish)
        assert response.status_code == 202, response.text
        await gateway.until("m", "ready")
        error = await ask(
            gateway.client, path, 502, model="m", messages=MESSAGES, input="x", stream=False
        )
        assert "not one of its API" in error["error"]


async def test_a_client_that_leaves_ends_the_request_of_the_engine(tmp_path: Path) -> None:
    async with running(
        tmp_path, lambda spec: EngineScript(model=spec.model, tokens_per_second=5)
    ) as gateway:
        await serve(gateway, tmp_path)
        body = {"model": "m", "messages": MESSAGES, "options": {"num_predict": 4000}}
        async with gateway.client.stream("POST", "/api/chat", json=body) as answer:
            async for _ in answer.aiter_lines():
                break

        async def is_idle() -> bool:
            return not (await gateway.client.get("/admin/requests")).json()["data"]

        assert await wait_until("no request is in flight", is_idle)


async def test_a_client_that_reads_nothing_is_held_to_the_limits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its call has no place for more of the engine's answer, and is checked twice a second."""
    event = b'data: {"choices": [{"delta": {"content": "%b"}}]}\n\n' % (b"x" * 1000)
    has_left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if request.startswith(b"GET"):
            body = b'{"data": [{"id": "m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(event)
                    await writer.drain()
            has_left.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    async with server, running(tmp_path, healthy) as gateway:
        wish = {"name": "m", "endpoint": f"http://127.0.0.1:{port}/v1"}
        await gateway.client.post("/admin/models", json=wish)
        await gateway.until("m", "ready")
        body = {"model": "m", "messages": MESSAGES}
        async with gateway.client.stream("POST", "/api/chat", json=body) as stream:
            assert stream.status_code == 200
            await asyncio.sleep(4 * SWEEP_S)
        await has_left.wait()
    assert "internal error" not in caplog.text


@pytest.mark.parametrize(
    ("start", "stream"),
    [(b": ", True), (b"data: ", True), (b'{"a": "', False)],
    ids=["a comment", "an event", "an answer"],
)
async def test_an_answer_without_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, stream: bool
) -> None:
    monkeypatch.setattr(inner_answer, "LINE_BYTES", 256 * 1024)
    monkeypatch.setattr(inner_answer, "ANSWER_BYTES", 256 * 1024)
    has_left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if request.startswith(b"GET"):
            body = b'{"data": [{"id": "m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        else:
            kind = b"text/event-stream" if stream else b"application/json"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n\r\n" % kind + start)
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x" * 4096)
                    await writer.drain()
            has_left.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    async with server, running(tmp_path, healthy) as gateway:
        wish = {"name": "m", "endpoint": f"http://127.0.0.1:{port}/v1"}
        await gateway.client.post("/admin/models", json=wish)
        await gateway.until("m", "ready")
        status = 200 if stream else 502
        error = await ask(
            gateway.client, "/api/chat", status, model="m", messages=MESSAGES, stream=stream
        )
        assert "is over 262,144 bytes" in error["error"]
        await has_left.wait()
