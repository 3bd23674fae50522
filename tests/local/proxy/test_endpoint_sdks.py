"""The rest of the surface, by the official SDKs: an engine's answer on each endpoint comes through
byte for byte.

The engine here answers from a table, so that endpoints are covered which no small engine has.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.patience import HANG_S
from tests.support.sdk_calls import (
    ANTHROPIC,
    ANTHROPIC_REFUSED,
    KEY,
    MESSAGES,
    OPENAI_RESPONSES,
    AnthropicCall,
    OpenAICall,
    anthropic_client,
    openai_client,
    told_anthropic,
    told_openai,
)
from tests.support.served import Served, serve_models

WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(range(256)) * 20
USAGE = {"input_tokens": 3, "output_tokens": 2}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "hé"}],
}
MESSAGE |= {"stop_reason": "end_turn", "stop_sequence": None, "usage": USAGE}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "output": [],
}
RESPONSE |= {
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "error": None,
    "incomplete_details": None,
}


def event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()


MESSAGE_EVENTS = b"".join(
    (
        event("message_start", message={**MESSAGE, "content": [], "stop_reason": None}),
        event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        event("ping"),
        event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hé"}),
        event("content_block_stop", index=0),
        event(
            "message_delta",
            delta={"stop_reason": "end_turn", "stop_sequence": None},
            usage={"output_tokens": 2},
        ),
        event("message_stop"),
    )
)
RESPONSE_EVENTS = event("response.created", sequence_number=0, response=RESPONSE) + event(
    "response.completed", sequence_number=1, response=RESPONSE
)
TABLE: dict[str, bytes] = {
    path: json.dumps(value, ensure_ascii=False).encode()
    for path, value in {
        "GET /v1/models": {
            "object": "list",
            "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x"}],
        },
        "POST /v1/messages": MESSAGE,
        "POST /v1/messages/count_tokens": {"input_tokens": 3},
        "POST /v1/responses": RESPONSE,
        "GET /v1/responses/resp_1": RESPONSE,
        "POST /v1/responses/resp_1/cancel": {**RESPONSE, "status": "cancelled"},
        "POST /v1/rerank": {
            "id": "r",
            "model": "m",
            "results": [{"index": 0, "relevance_score": 0.5}],
        },
        "POST /v2/rerank": {"id": "r", "results": []},
        "POST /rerank": {"id": "r", "results": []},
        "POST /v1/score": {
            "object": "list",
            "data": [{"index": 0, "object": "score", "score": 1.0}],
        },
        "POST /score": {"object": "list", "data": []},
        "POST /classify": {"object": "list", "data": [{"index": 0, "label": "yes"}]},
        "POST /v1/classify": {"object": "list", "data": [{"index": 0, "label": "yes"}]},
        "POST /tokenize": {"count": 2, "max_model_len": 9, "tokens": [1, 2]},
        "POST /detokenize": {"prompt": "hé"},
        "POST /v1/audio/transcriptions": {"text": "hé"},
        "POST /v1/audio/translations": {"text": "hey"},
    }.items()
}


class Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # One list for all connections is the point.
    exchanges: list[tuple[str, bytes, str]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = (
            self.rfile.read(int(self.headers["content-length"]))
            if "content-length" in self.headers
            else self._chunks()
        )
        self.exchanges.append(
            (f"{self.command} {self.path}", body, self.headers.get("content-type", ""))
        )
        is_stream = body.startswith(b"{") and json.loads(body).get("stream")
        if is_stream and self.path in ("/v1/messages", "/v1/responses"):
            events = MESSAGE_EVENTS if self.path == "/v1/messages" else RESPONSE_EVENTS
            self._answer(200, "text/event-stream; charset=utf-8", events)
        elif self.path == "/v1/messages" and b'"max_tokens"' not in body:
            error = {
                "type": "error",
                "error": {"type": "invalid_request_error", "message": "max_tokens: Field required"},
            }
            self._answer(400, "application/json", json.dumps(error).encode())
        elif self.path == "/v1/audio/speech":
            self._answer(200, "audio/wav", WAV)
        else:
            self._table()

    def do_GET(self) -> None:
        self._table()

    def _table(self) -> None:
        row = TABLE.get(f"{self.command} {self.path.partition('?')[0]}")
        if row is None:
            self._answer(404, "application/json", b'{"detail":"Not Found"}')
        else:
            self._answer(200, "application/json", row)

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def gateway(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    with serve_models(
        folder, {"m": [f"{engine}/v1"]}, admin_key=f"{KEY}-admin", FITSERVE_API_KEY=KEY
    ) as running:
        yield running


@pytest.mark.parametrize("call", ANTHROPIC.values(), ids=ANTHROPIC)
def test_anthropic_calls_get_equal_answers(
    call: AnthropicCall, gateway: Served, engine: str
) -> None:
    straight, through = (told_anthropic(call, url, "m") for url in (engine, gateway.url))
    assert straight.status
    assert through == straight
    assert (through.source, through.sent) == ("engine", straight.sent)


@pytest.mark.parametrize("call", ANTHROPIC_REFUSED.values(), ids=ANTHROPIC_REFUSED)
def test_a_refusal_of_the_gateway_has_anthropics_shape(
    call: AnthropicCall, gateway: Served
) -> None:
    error = told_anthropic(call, gateway.url, "m")
    assert (error.status, error.error, error.source) == (404, "NotFoundError", "gateway")
    answer = json.loads(error.body)
    assert (answer["type"], answer["error"]["type"]) == ("error", "not_found_error")
    assert "nobody" in answer["error"]["message"]


def test_the_anthropic_sdks_own_key_header_is_taken(gateway: Served) -> None:
    with anthropic_client(gateway.url) as client:
        answer = client.messages.create(model="m", max_tokens=4, messages=MESSAGES)
        assert answer.content[0].text == "hé"  # type: ignore[union-attr]
    wrong = anthropic.Anthropic(base_url=gateway.url, api_key="sk-wrong-0123456789", max_retries=0)
    with wrong as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model="m", max_tokens=4, messages=MESSAGES)


def test_the_anthropic_sdk_reads_the_stream(gateway: Served) -> None:
    with (
        anthropic_client(gateway.url) as client,
        client.messages.stream(model="m", max_tokens=4, messages=MESSAGES) as stream,
    ):
        assert "".join(stream.text_stream) == "hé"
        assert stream.get_final_message().stop_reason == "end_turn"


@pytest.mark.parametrize("call", OPENAI_RESPONSES.values(), ids=OPENAI_RESPONSES)
def test_calls_of_responses_get_equal_answers(
    call: OpenAICall, gateway: Served, engine: str
) -> None:
    straight, through = (told_openai(call, url, "m") for url in (engine, gateway.url))
    assert through == straight
    assert (through.status, through.source, through.sent) == (200, "engine", straight.sent)


def test_a_response_is_found_and_cancelled_where_it_was_made(gateway: Served) -> None:
    with openai_client(gateway.url) as client:
        response = client.responses.create(model="m", input="Hello", background=True)
        assert client.responses.retrieve(response.id).status == "completed"
        assert client.responses.cancel(response.id).status == "cancelled"


AUDIO: dict[str, Callable[[openai.OpenAI], Any]] = {
    "transcription": lambda c: c.audio.transcriptions.create(
        model="m", file=("a.wav", WAV * 400), language="de"
    ),
    "translation": lambda c: c.audio.translations.create(model="m", file=("a.wav", WAV)),
}


# The SDK has this word on translations.
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", AUDIO)
def test_a_recording_comes_through_as_it_was_sent(kind: str, gateway: Served) -> None:
    with openai_client(gateway.url) as client:
        assert AUDIO[kind](client).text in ("hé", "hey")
    path, body, content_type = Engine.exchanges[-1]
    assert path == f"POST /v1/audio/{kind}s"
    assert content_type.startswith("multipart/form-data; boundary=")
    boundary = content_type.partition("boundary=")[2].strip('"').encode()
    assert body.endswith(b"--" + boundary + b"--\r\n")
    assert body.count(WAV) == (400 if kind == "transcription" else 1)


def test_speech_comes_back_untouched(gateway: Served) -> None:
    with openai_client(gateway.url) as client:
        assert client.audio.speech.create(model="m", input="hé", voice="alloy").read() == WAV


PLAIN: dict[str, dict[str, Any]] = {
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/classify": {"input": ["a"]},
    "/v1/classify": {"input": ["a"]},
    "/tokenize": {"prompt": "hé"},
    "/detokenize": {"tokens": [1, 2]},
}


@pytest.mark.parametrize("path", PLAIN)
def test_endpoints_without_an_sdk_come_through(path: str, gateway: Served) -> None:
    document = json.dumps({"model": "m", **PLAIN[path]}, ensure_ascii=False).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    answer = httpx.post(
        gateway.url + path, content=document, headers=headers, trust_env=False, timeout=HANG_S
    )
    assert (answer.status_code, answer.content) == (200, TABLE[f"POST {path}"])
    assert answer.headers["x-gateway-source"] == "engine"
    assert Engine.exchanges[-1] == (f"POST {path}", document, "application/json")


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/invocations",
        "/v1/load_lora_adapter",
        "/update_weights",
        "/v1/realtime",
        "/v1/messages/batches",
        "/pause",
        "/inference/v1/generate",
    ],
)
def test_paths_outside_the_surface_reach_no_engine(path: str, gateway: Served) -> None:
    before = len(Engine.exchanges)
    headers = {"authorization": f"Bearer {KEY}-admin"}
    answer = httpx.post(
        gateway.url + path, json={"model": "m"}, headers=headers, trust_env=False, timeout=HANG_S
    )
    assert answer.status_code in (404, 405)
    assert len(Engine.exchanges) == before
