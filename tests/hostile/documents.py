"""Requests of each API whose JSON is read by the gateway: OpenAI's, Anthropic's, Ollama's and the
admin API.

Their framing is good, so that each change of a value reaches the reader of that API.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from typing import Any

from gateway.proxy.api.endpoints import ENDPOINTS
from tests.hostile.corpus import Seed, chunks, request
from tests.hostile.json_values import VALUES, changed_json

CHUNKED = b"transfer-encoding: chunked"
_SHORT = tuple(text for text in VALUES if len(text) < 1000)
# Long texts are rare: they cost a hundred times the time of others.
_VALUES = (*_SHORT * 9, *VALUES)
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
_TEXT = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
_MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [_TEXT, _PICTURE]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "a", "tool_name": "f", "content": "1"},
]
_CHAT = {
    "messages": _MESSAGES,
    "tools": [_TOOL],
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "n": 1,
    "stop": ["a"],
    "seed": 1,
    "logit_bias": {"1": 1},
    "stream": False,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
    "user": "u",
    "metadata": {"a": "b"},
}
# Fields by the name of an endpoint. Others get those of a text.
_FIELDS: dict[str, dict[str, Any]] = {
    "chat": _CHAT,
    "completions": {"prompt": ["a", "b"], "max_tokens": 5, "stream": True, "suffix": "c"},
    "responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "previous_response_id": None,
        "max_output_tokens": 5,
        "store": True,
        "background": False,
        "stream": False,
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
    },
    "embeddings": {"input": ["a", "b"], "dimensions": 8, "encoding_format": "base64"},
    "rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    "score": {"text_1": "a", "text_2": ["b", "c"]},
    "speech": {"input": "a", "voice": "b", "response_format": "wav"},
    "tokenize": {"prompt": "a", "add_special_tokens": True},
    "detokenize": {"tokens": [1, 2, 3]},
    "messages": {
        "max_tokens": 5,
        "system": [_TEXT],
        "messages": [{"role": "user", "content": [_TEXT]}],
        "stop_sequences": ["a"],
        "stream": True,
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "metadata": {"user_id": "u"},
    },
}
_OPTIONS = {
    "temperature": 0.5,
    "top_k": 5,
    "seed": 1,
    "stop": ["a"],
    "num_predict": 5,
    "repeat_penalty": 1.1,
    "num_ctx": 100,
}
_OLLAMA_MESSAGES = [
    {"role": "user", "content": "hi", "images": ["iVBORw0KGgo="]},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_name": "f", "content": "1"},
]
_OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": {
        "messages": _OLLAMA_MESSAGES,
        "tools": [_TOOL],
        "options": _OPTIONS,
        "think": True,
        "format": {"type": "object"},
        "stream": False,
        "keep_alive": "5m",
    },
    "/api/generate": {
        "prompt": "a",
        "system": "b",
        "suffix": "",
        "images": ["/9j/"],
        "raw": False,
        "options": _OPTIONS,
        "format": "json",
        "think": "low",
        "keep_alive": 0,
    },
    "/api/embed": {"input": ["a", "b"], "dimensions": 8, "truncate": True},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {"name": "a", "verbose": True},
    "/api/tags": {},
    "/api/ps": {},
    "/api/version": {},
    "/api/pull": {"name": "a"},
}
_UNKNOWN = "no-model"
# Nothing of these adds or changes a model: a fuzzed gateway stays as it is.
_ADMIN: dict[str, dict[str, Any]] = {
    "POST /admin/models?dry_run=true": {
        "name": _UNKNOWN,
        "endpoints": ["http://127.0.0.1:9/v1"],
        "aliases": ["a", "org/b:c"],
        "args": {"max-num-seqs": 8},
        "env": {"A": "1"},
        "policy": {"max_attempts": 5, "keep_alive": "5m", "priority": 0, "wait_s": 0},
        "chat_template": {"text": "{{ messages }}", "name": "t"},
        "context": 2048,
        "replicas": 1,
    },
    "POST /admin/plan": {"source": "/no/such/folder", "engines": ["vllm==0.26.0"], "context": 1},
    "PATCH /admin/models/" + _UNKNOWN: {"context": 2048, "replicas": 2, "policy": {"pinned": True}},
    f"POST /admin/models/{_UNKNOWN}/bench": {"concurrency": 1, "requests": 1},
    f"POST /admin/models/{_UNKNOWN}/tune": {"goal": "latency"},
    f"POST /admin/models/{_UNKNOWN}/retry": {},
    f"DELETE /admin/models/{_UNKNOWN}": {},
    "DELETE /admin/facts/7": {},
    "DELETE /admin/requests/a": {},
    "GET /admin/usage?since=2026-01-01&by=key": {},
    "GET /admin/requests": {},
    f"GET /admin/models/{_UNKNOWN}/logs?lines=5": {},
    "GET /version": {},
    "GET /readyz": {},
}
_RESPONSES = (
    "GET /v1/responses/resp_a",
    "GET /v1/responses/resp_a?stream=true&starting_after=1",
    "POST /v1/responses/resp_a/cancel",
    "DELETE /v1/responses/resp_a",
)
# Lines of a head that a reader of some API or some parser may take to heart.
_LINES = (
    b"x-api-key: a",
    b"anthropic-version: 2023-06-01",
    b"authorization: Bearer a",
    b"range: x",
    b"authorization: Basic YTpi",
    b"cookie: a=b",
    b"origin: http://127.0.0.1",
    b"te: trailers",
    b"expect: 100-continue",
    b"connection: close, x-canary",
    b"connection: keep-alive",
    b"accept: text/event-stream",
    b"accept-encoding: gzip;q=0, br",
    b"prefer: wait=1",
    b"x-forwarded-for: 10.0.0.1",
    b"forwarded: for=a;proto=https",
    b"x-http-method: DELETE",
    b"x-request-id: " + b"a" * 300,
    b"traceparent: 00-" + b"a" * 32,
    b"via: 1.1 fitserve",
    b"keep-alive: timeout=1",
    b"proxy-connection: close",
    b"content-language: \xff",
    b"sec-fetch-site: cross-site",
    b"if-none-match: *",
    b"content-range: bytes 0-1/2",
    b"x-empty:",
    b"x-tab:\ta\t",
    b"x-high: \xc3\xb6",
    b"max-forwards: 0",
    b"upgrade: h2c",
)
_TRAILERS = (b"", b"", b"x: a\r\n", b"content-length: 7\r\n", b"authorization: Bearer a\r\n")


@dataclass(frozen=True)
class Document:
    """A request by its method and target, and the document that is its body."""

    method: str
    target: str
    fields: dict[str, Any]


def _document(line: str, fields: dict[str, Any]) -> Document:
    """A document by "METHOD TARGET"."""
    method, _, target = line.partition(" ")
    return Document(method, target, fields)


def documents(model: str) -> list[Document]:
    """One of each endpoint of each API, for `model`."""
    inference = [
        Document(
            endpoint.method,
            endpoint.path,
            {
                "model": model,
                **_FIELDS.get(endpoint.name, {"input": "a", "messages": _MESSAGES[:1]}),
            },
        )
        for endpoint in ENDPOINTS
        if endpoint.body == "json"
    ]
    ollama = [Document("POST", path, {"model": model, **_OLLAMA[path]}) for path in _OLLAMA]
    lists = [Document("GET", path, {}) for path in ("/api/tags", "/api/ps", "/api/version")]
    other_documents = [_document(line, {}) for line in _RESPONSES]
    admin = [_document(line, fields) for line, fields in _ADMIN.items()]
    return [*inference * 2, *ollama * 3, *lists, *other_documents, *admin]


def changed_document(random_: random.Random, whole: list[Document]) -> bytes:
    """A request of one of `whole` with changed values, framed well in one of several ways."""
    seed = random_.choice(whole)
    text = changed_json(random_, copy.deepcopy(seed.fields), _VALUES)
    return _frame(random_, seed, text.encode("utf-8", "surrogatepass"))


def _frame(random_: random.Random, seed: Document, body: bytes) -> bytes:
    version = b"1.0" if random_.random() < 0.15 else b"1.1"
    line = b"%b %b HTTP/%b" % (seed.method.encode(), seed.target.encode(), version)
    lines = random_.sample(_LINES, random_.choice((0, 0, 1, 2, 5)))
    if version == b"1.0" or random_.random() < 0.7:
        return request(body, *lines, line=line)
    at = random_.randrange(len(body) + 1)
    parts = [part for part in (body[:at], body[at:]) if part]
    whole = chunks(*parts)[:-2] + random_.choice(_TRAILERS) + b"\r\n"
    return request(whole, *lines, CHUNKED, line=line, length=None)


def plain(model: str) -> list[Seed]:
    """The good requests to engines and of Ollama's API, for changes to bytes."""
    random_ = random.Random(1)
    return [
        Seed(document.target, _frame(random_, document, json.dumps(document.fields).encode()), None)
        for document in documents(model)
        if not document.target.startswith(("/admin", "/version", "/readyz"))
    ]
