"""The ASGI application around that of a process, which answers Ollama's API.

    /api/chat, /api/generate     POST /v1/chat/completions, /v1/completions; lines of JSON
    the same, keep_alive 0       POST /admin/models/NAME/unload
    /api/embed, /api/embeddings  POST /v1/embeddings
    /api/tags, /api/ps           GET /v1/models
    /api/show                    GET /v1/models
    /api/pull                    success for a model that is here
    /api/version                 the version of fitserve
    /api/v0/models               GET /v1/models, in the form of LM Studio

Requests of /v1 never come here, see `ClientConnection`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.decoding import DECODE_ERRORS
from gateway.errors import (
    BadRequest,
    FitserveError,
    MethodNotAllowed,
    NotFound,
    TooLarge,
    UpstreamError,
    no_route_error,
)
from gateway.proxy import refusals
from gateway.proxy.api.foreign_routes import foreign_hint
from gateway.proxy.api.protocol import dump, error_headers, new_id
from gateway.proxy.disconnect import wait_for_disconnect
from gateway.proxy.inner_answer import InnerAnswer
from gateway.proxy.ollama import lm_studio_answers, ollama_answers
from gateway.proxy.ollama.inner_request import inner_request
from gateway.proxy.ollama.ollama_answers import AnswerTimes, StreamedAnswer, error_text
from gateway.proxy.ollama.ollama_requests import (
    OpenAIRequest,
    chat_request,
    embed_request,
    generate_request,
    is_unload,
)
from gateway.proxy.request_reader import admit
from gateway.proxy.routing.model_route import ModelCard
from gateway.version import __version__

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection
    from gateway.proxy.data_plane import DataPlane

PREFIX = "/api/"
_REQUESTS: dict[str, Callable[[Mapping[str, Any]], OpenAIRequest]] = {
    "/api/chat": chat_request,
    "/api/generate": generate_request,
    "/api/embed": embed_request,
    "/api/embeddings": embed_request,
}
_UNLOADING_PATHS = frozenset({"/api/chat", "/api/generate"})
_DEFAULT_TAG = ":latest"
# Methods by path.
_LISTS = {
    "/api/tags": "GET",
    "/api/ps": "GET",
    "/api/show": "POST",
    "/api/version": "GET",
    "/api/pull": "POST",
    lm_studio_answers.MODELS: "GET",
}
# Headers of an answer of /v1 that the caller gets too.
_ANSWER_HEADERS = (
    b"access-control-",
    b"x-ratelimit-",
    b"x-fitserve-budget-warning",
    b"x-should-retry",
    b"retry-after",
    b"x-request-id",
    b"vary",
    b"www-authenticate",
    b"allow",
)
Headers = Iterable[tuple[bytes, bytes]]


class OllamaApp:
    """Answers paths below /api/, and passes all others on."""

    def __init__(self, app: ASGIApp, plane: DataPlane) -> None:
        self._app = app
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and scope["path"].startswith(PREFIX)
        if not is_ours or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        call = _OllamaCall(self._plane, scope, receive, send)
        try:
            await call.answer()
        except FitserveError as error:
            await call.refuse(error)
        except asyncio.CancelledError:
            if not call.is_abandoned:
                raise
        except ConnectionError:
            await call.refuse(UpstreamError("The answer was cut off.", hint="Try again."))
        except OSError:
            await call.refuse(refusals.connection_limit_error())
        except MemoryError:
            await call.refuse(refusals.memory_error())
        except RecursionError:
            await call.refuse(
                BadRequest("The body is nested too deeply.", hint="Send flatter objects.")
            )


class _OllamaCall:
    """One request of Ollama's API."""

    def __init__(self, plane: DataPlane, scope: Scope, receive: Receive, send: Send) -> None:
        self._plane = plane
        self._caller: ClientConnection = scope["extensions"]["fitserve"]["connection"]
        self._method = scope["method"]
        self._path = scope["path"]
        self._headers = scope["headers"]
        self._receive = receive
        self._send = send
        self._start_s = time.time()
        self._first = 0.0
        self._has_started = False
        self.is_abandoned = False  # the client has left

    async def answer(self) -> None:
        """Answer the request. Raises FitserveError and OSError."""
        path = self._path
        # The check comes before the body, so that the body of a stranger is neither kept nor
        # parsed.
        try:
            admit(self._caller, dict(self._headers))
        except FitserveError as error:
            self._plane.meter.count_rejection(error, new_id(), self._caller.client_address)
            raise
        if path in _REQUESTS:
            self._check_method("POST")
            body = await self._body()
            if path == "/api/embed" and body.get("input") in (None, "", []):
                # No text has no vectors (EmbedHandler in server/routes.go); an engine refuses it.
                await self._answer_list(body)
            elif path in _UNLOADING_PATHS and is_unload(body):
                await self._unload(_model_name(body))
            else:
                await self._query_engine(_REQUESTS[path](body), _model_name(body))
        elif path in _LISTS:
            self._check_method(_LISTS[path])
            await self._answer_list(await self._body() if _LISTS[path] == "POST" else {})
        elif path.startswith(f"{lm_studio_answers.MODELS}/"):
            self._check_method("GET")
            await self._answer_list({"model": path.removeprefix(f"{lm_studio_answers.MODELS}/")})
        else:
            hint = foreign_hint(path) or "docs/api.md lists the calls of Ollama's API."
            raise no_route_error(self._method, path, hint)

    async def refuse(self, error: FitserveError) -> None:
        """The error in Ollama's form, in the head or as a last line."""
        answer = {"error": str(error)}
        if self._has_started:
            await self._write_body(dump(answer) + b"\n", has_more=False)
        else:
            headers = error_headers(error)
            if self._plane.origins is not None:
                headers += self._plane.origins.headers(dict(self._headers).get(b"origin"))
            await self._reply_whole(error.status, answer, headers)

    async def _query_engine(self, request: OpenAIRequest, name: str) -> None:
        fields = {field: value for field, value in request.body.items() if value is not None}
        fields["model"] = self._served_name(name)
        body = dump(fields)
        disconnection = asyncio.ensure_future(self._wait_for_leave(asyncio.current_task()))
        try:
            await self._translate_request(request, name, body)
        finally:
            disconnection.cancel()

    async def _unload(self, name: str) -> None:
        """Unload a model, as its owner may: the caller's key needs the scope for it."""
        path = f"/admin/models/{quote(self._served_name(name), safe='/')}/unload"
        async with self._inner_request("POST", path, b"") as inner_answer:
            if inner_answer.status >= 400:
                await self._reply_error(inner_answer)
                return
        now = time.time()
        answer = StreamedAnswer(name, is_chat=self._path == "/api/chat")
        await self._reply_whole(
            200, answer.load_end(AnswerTimes(self._start_s, None, now), "unload"), ()
        )

    async def _translate_request(self, request: OpenAIRequest, name: str, body: bytes) -> None:
        async with self._inner_request("POST", request.path, body) as inner_answer:
            if inner_answer.status >= 400:
                await self._reply_error(inner_answer)
            elif request.stream:
                answer = StreamedAnswer(name, is_chat=self._path == "/api/chat")
                await self._stream_answer(inner_answer, answer)
            else:
                event = _answer_event(await inner_answer.body())
                with _readable_answer():
                    complete_body = self._complete_body(request, event, name)
                await self._reply_whole(200, complete_body, inner_answer.headers)

    def _complete_body(self, request: OpenAIRequest, event: Any, name: str) -> dict[str, Any]:
        now = time.time()
        times = AnswerTimes(self._start_s, None, now)
        if self._path == "/api/embed":
            return ollama_answers.embeddings(event, name, times)
        if self._path == "/api/embeddings":
            rows = event.get("data") or [{}]
            return {"embedding": rows[0].get("embedding")}
        answer = StreamedAnswer(name, is_chat=self._path == "/api/chat")
        return answer.load_end(times) if request.loads_model else answer.whole(event, times)

    async def _stream_answer(self, inner_answer: InnerAnswer, answer: StreamedAnswer) -> None:
        await self._start_answer(200, b"application/x-ndjson", inner_answer.headers)
        async for line in inner_answer.lines():
            if await self._pass_on(line, answer):
                return
        times = AnswerTimes(self._start_s, self._first or time.time(), time.time())
        with _readable_answer():
            lines = answer.last_lines(times)
        await self._write_body(_joined_lines(lines), has_more=False)

    async def _pass_on(self, line: bytes, answer: StreamedAnswer) -> bool:
        """Write the lines for a line of the event stream; whether it was an error."""
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            return False
        event = _answer_event(data)
        with _readable_answer():
            lines = answer.lines(event, time.time())
        is_error = any("error" in each_line for each_line in lines)
        if lines:
            self._first = self._first or time.time()
            await self._write_body(_joined_lines(lines), has_more=not is_error)
        return is_error

    async def _wait_for_leave(self, task: asyncio.Task[Any] | None) -> None:
        """End the task once the client has left."""
        await wait_for_disconnect(self._receive)
        self.is_abandoned = True
        if task is not None:
            task.cancel()

    async def _answer_list(self, body: Mapping[str, Any]) -> None:
        async with self._inner_request("GET", "/v1/models", b"") as inner_answer:
            if inner_answer.status >= 400:
                await self._reply_error(inner_answer)
                return
            model_list = _answer_event(await inner_answer.body())
        complete_body = self._list_answer(model_list, body)
        if self._path == "/api/pull" and body.get("stream") is not False:
            await self._start_answer(200, b"application/x-ndjson", inner_answer.headers)
            await self._write_body(_joined_lines(ollama_answers.pull_lines()), has_more=False)
        else:
            await self._reply_whole(200, complete_body, inner_answer.headers)

    def _list_answer(
        self, model_list: Mapping[str, Any], body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The answer by the list of /v1/models, which has only the models of the caller. Raises
        NotFound."""
        facts = {name: route.card for name, route in self._plane.routes.table.models.items()}
        if self._path == "/api/version":
            return {"version": __version__}
        if self._path == lm_studio_answers.MODELS:
            return lm_studio_answers.models(model_list, facts)
        if self._path in ("/api/tags", "/api/ps"):
            is_ps = self._path == "/api/ps"
            return ollama_answers.models(model_list, facts, time.time(), shows_loaded_only=is_ps)
        name = self._served_name(_model_name(body))
        card = next((card for card in model_list["data"] if card["id"] == name), None)
        if card is None:
            hint = "See /api/tags."
            if self._path == "/api/pull":
                hint = "The operator adds one with `fitserve add NAME SOURCE`."
            raise NotFound(f"The model '{name[:100]}' does not exist here.", hint=hint)
        if self._path == "/api/pull":
            return ollama_answers.pull_lines()[-1]
        if self._path == "/api/embed":
            now = time.time()
            times = AnswerTimes(self._start_s, None, now)
            return ollama_answers.embeddings({}, str(_model_name(body)), times)
        facts_of_model = facts.get(name, ModelCard())
        if self._path == "/api/show":
            return ollama_answers.model_card(card, facts_of_model)
        return lm_studio_answers.model(card, facts_of_model)

    def _inner_request(self, method: str, path: str, body: bytes) -> Any:
        return inner_request(self._caller, method, path, self._headers, body)

    def _served_name(self, name: Any) -> str:
        """The name of a model, with or without the tag `:latest` as it is known here. Raises
        NotFound."""
        if not isinstance(name, str):
            raise NotFound("The request names no model.", hint="GET /api/tags lists the models.")
        routes = self._plane.routes.table.models
        short_name = name.removesuffix(_DEFAULT_TAG)
        spellings = (name, short_name, short_name + _DEFAULT_TAG)
        return next((spelling for spelling in spellings if spelling in routes), name)

    def _check_method(self, method: str) -> None:
        if self._method != method and (self._method, method) != ("HEAD", "GET"):
            raise MethodNotAllowed(
                f"{self._path} takes {method}, not {self._method}.",
                hint=f"Use {method}.",
                allow=method,
            )

    async def _body(self) -> Mapping[str, Any]:
        """The JSON object of the request. Raises BadRequest and TooLarge."""
        data = bytearray()
        limit = self._plane.limits.body_bytes
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            data += message.get("body", b"")
            if len(data) > limit:
                raise TooLarge(f"The body is over {limit:,} bytes.", hint="Send less.")
            if not message.get("more_body"):
                break
        try:
            body = msgspec.json.decode(data)
        except DECODE_ERRORS:
            raise BadRequest("This is not JSON.", hint="Send a JSON object.") from None
        if not isinstance(body, dict) or not isinstance(_model_name(body), str):
            raise BadRequest(
                "The body needs a `model`.", hint="GET /api/tags lists the models.", param="model"
            )
        return body

    async def _reply_error(self, inner_answer: InnerAnswer) -> None:
        """Reply with the error of an answer of /v1. Raises UpstreamError."""
        error = _answer_event(await inner_answer.body())
        await self._reply_whole(
            inner_answer.status, {"error": error_text(error)}, inner_answer.headers
        )

    async def _reply_whole(self, status: int, body: Any, answer_headers: Headers) -> None:
        data = dump(body)
        await self._start_answer(status, b"application/json", answer_headers, len(data))
        await self._write_body(data, has_more=False)

    async def _start_answer(
        self, status: int, kind: bytes, answer_headers: Headers, length: int | None = None
    ) -> None:
        """answer_headers: headers of the answer of /v1 or of the refusal."""
        headers = [(b"content-type", kind), (b"x-gateway-source", b"gateway")]
        headers += [(b"content-length", b"%d" % length)] if length is not None else []
        headers += [
            (name, value) for name, value in answer_headers if name.startswith(_ANSWER_HEADERS)
        ]
        self._has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write_body(self, data: bytes, *, has_more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": has_more})


def _model_name(body: Mapping[str, Any]) -> Any:
    return body.get("model") or body.get("name")


def _answer_event(data: bytes) -> Any:
    """The JSON of an answer of /v1. Raises UpstreamError."""
    try:
        return msgspec.json.decode(data)
    except DECODE_ERRORS:
        raise _unreadable_answer_error() from None


@contextmanager
def _readable_answer() -> Iterator[None]:
    """Turn an answer with other fields than those of the API into an UpstreamError."""
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError):
        raise _unreadable_answer_error() from None


def _unreadable_answer_error() -> UpstreamError:
    return UpstreamError(
        "The engine's answer is not one of its API.", hint="The engine's log may have the cause."
    )


def _joined_lines(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(dump(line) + b"\n" for line in lines)
