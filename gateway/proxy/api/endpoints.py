"""The table of endpoints that clients may call. Any other path is answered with 404.

Engines expose unauthenticated control endpoints (/sleep, /update_weights, /invocations). So a path
to an engine is written from this table, never from the client's bytes.

    task         kind of model that can answer (ModelRoute.task); an unknown task is allowed
    body         json: an object with `model`; form: multipart/form-data with a field `model`;
                 none: the body is ignored
    shape        the API whose errors the client expects
    destination  engine: passed on; id: passed on to the replica that made the response of that id;
                 models: answered here
"""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass, field
from typing import Any, Literal

import httptools

from gateway.errors import BadRequest, MethodNotAllowed, NotFound
from gateway.proxy.api.foreign_routes import foreign_hint

Shape = Literal["openai", "anthropic"]

_RESPONSE = re.compile(r"/v1/responses/(resp_[\w-]{1,120})(/cancel)?", re.ASCII)
# Query parameters of a retrieval that engines read: vLLM's `retrieve_responses` takes these two.
_QUERY = re.compile(
    rb"(?:stream=\w{1,5}|starting_after=\d{1,9})(?:&(?:stream=\w{1,5}|starting_after=\d{1,9}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Row of the table.

    path: the path at the engine.
    name: a short name for metrics.
    """

    name: str
    method: str
    path: str
    tasks: frozenset[str]
    body: Literal["json", "form", "none"] = "json"
    shape: Shape = "openai"
    destination: Literal["engine", "id", "models"] = "engine"
    id: str = ""
    query: str = ""
    method_bytes: bytes = field(init=False)
    target: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "method_bytes", self.method.encode())
        object.__setattr__(self, "target", f"{self.path}?{self.query}".rstrip("?").encode())

    def check(self, model: str, task: str | None) -> None:
        """Check that a model of that task can answer. Raises BadRequest."""
        if task is None or task in self.tasks:
            return
        task_words, hint = _TASKS.get(task, _TASKS["generate"])
        raise BadRequest(
            f"The model '{model}' {task_words}, and {self.path} needs another kind of model.",
            hint=hint,
            param="model",
        )


# The work of the model and the path of its requests, by task.
_TASKS = {
    "generate": ("generates text", "Use /v1/chat/completions or /v1/completions."),
    "transcribe": ("writes speech as text", "Use /v1/audio/transcriptions."),
    "embed": ("makes embeddings", "Use /v1/embeddings."),
    "rerank": ("scores documents", "Use /v1/rerank or /v1/score."),
    "classify": ("classifies text", "Use /classify."),
}
_TEXT = frozenset({"generate"})
_VECTORS = frozenset({"embed"})
# Embeddings are compared, and a classifier of one label scores.
_SCORES = _VECTORS | {"rerank"}
_LABELS = frozenset({"classify", "rerank"})
# Language models can score (SGLang) and transcribe (vLLM). The engine reports a model that cannot.
_SPEECH = _TEXT | {"transcribe"}
_ALL_TASKS = frozenset(_TASKS)

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("chat", "POST", "/v1/chat/completions", _TEXT),
    Endpoint("completions", "POST", "/v1/completions", _TEXT),
    Endpoint("responses", "POST", "/v1/responses", _TEXT),
    Endpoint("embeddings", "POST", "/v1/embeddings", _VECTORS),
    Endpoint("rerank", "POST", "/v1/rerank", _SCORES),
    Endpoint("rerank", "POST", "/v2/rerank", _SCORES),
    Endpoint("rerank", "POST", "/rerank", _SCORES),
    Endpoint("score", "POST", "/v1/score", _TEXT | _SCORES),
    Endpoint("score", "POST", "/score", _TEXT | _SCORES),
    Endpoint("classify", "POST", "/classify", _LABELS),
    Endpoint("classify", "POST", "/v1/classify", _LABELS),
    Endpoint("transcriptions", "POST", "/v1/audio/transcriptions", _SPEECH, body="form"),
    Endpoint("translations", "POST", "/v1/audio/translations", _SPEECH, body="form"),
    Endpoint("speech", "POST", "/v1/audio/speech", _TEXT),
    Endpoint("tokenize", "POST", "/tokenize", _ALL_TASKS),
    Endpoint("detokenize", "POST", "/detokenize", _ALL_TASKS),
    Endpoint("messages", "POST", "/v1/messages", _TEXT, shape="anthropic"),
    Endpoint("count_tokens", "POST", "/v1/messages/count_tokens", _TEXT, shape="anthropic"),
    Endpoint("models", "GET", "/v1/models", _ALL_TASKS, body="none", destination="models"),
)
_PATHS = {endpoint.path: endpoint for endpoint in ENDPOINTS}
# Paths under which clients of GPUStack and LM Studio call the same endpoints.
_FOREIGN_PATHS = {
    path.replace("/v1/", "/v1-openai/", 1): path for path in _PATHS if path.startswith("/v1/")
} | {f"/api/v0/{name}": f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings")}
# Endpoints by the exact bytes of method and target, found without parsing the URL.
USUAL_ENDPOINTS = {(endpoint.method_bytes, endpoint.target): endpoint for endpoint in ENDPOINTS}


# Files and batches (`gateway.server.batches`), which no engine has.
FILES_TARGET = b"/v1/files"
_BATCH_PATHS = ("/v1/files", "/v1/batches")


def is_of_batches(path: str) -> bool:
    """Whether a decoded path is one of files or batches, which the application answers."""
    return path in _BATCH_PATHS or path.startswith(tuple(f"{name}/" for name in _BATCH_PATHS))


def is_inference(path: str) -> bool:
    """Whether the data plane answers a decoded path, if only with a 404. The admin API answers the
    others."""
    return (
        path in _PATHS
        or path in _FOREIGN_PATHS
        or path.startswith(("/v1/", "/v2/"))
        or path in ("/v1", "/v2")
    )


def lacks_prefix(path: str) -> bool:
    """Whether a decoded path is that of an endpoint of OpenAI's API without its `/v1`."""
    return f"/v1{path}" in _PATHS or path.startswith("/models/")


def split_target(target: bytes) -> tuple[str, bytes]:
    """The decoded path and the raw query of a request target. Raises HttpParserInvalidURLError."""
    url: Any = httptools.parse_url(target)  # its query may be None, unlike its type hint says
    # Decoded like uvicorn's `scope["path"]`, so that a path means the same here and in FastAPI.
    path = (url.path or b"").decode("ascii")
    return urllib.parse.unquote(path) if "%" in path else path, url.query or b""


def shape_of(path: str) -> Shape:
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


def find(path: str, query: bytes, method: str) -> Endpoint:
    """The row for a decoded path. Raises NotFound, MethodNotAllowed."""
    endpoint = _PATHS.get(_FOREIGN_PATHS.get(path, path))
    if endpoint is None and path.startswith("/v1/models/"):
        endpoint = Endpoint(
            "models",
            "GET",
            "/v1/models",
            _ALL_TASKS,
            body="none",
            destination="models",
            id=path.removeprefix("/v1/models/"),
        )
    elif endpoint is None and (match := _RESPONSE.fullmatch(path)):
        needed_method = "POST" if match[2] else "GET"
        query_text = query.decode() if needed_method == "GET" and _QUERY.fullmatch(query) else ""
        endpoint = Endpoint(
            "responses",
            needed_method,
            path,
            _TEXT,
            body="none",
            destination="id",
            id=match[1],
            query=query_text,
        )
    if endpoint is None:
        raise NotFound(
            f"The path {path[:200]} does not exist.",
            hint=foreign_hint(path) or f"The endpoints are {_PATH_LIST}.",
        )
    if endpoint.method != method:
        raise MethodNotAllowed(
            f"{path[:200]} does not accept {method}.",
            hint=f"Use {endpoint.method}.",
            allow=endpoint.method,
        )
    return endpoint


_PATH_LIST = ", ".join(dict.fromkeys(endpoint.path for endpoint in ENDPOINTS))
