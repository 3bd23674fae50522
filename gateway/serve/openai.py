"""The OpenAI data plane: an ASGI callable that passes inference requests to an engine and its answer back, bytes untouched.

    POST /v1/chat/completions, /v1/completions, /v1/embeddings   to the replica of `model` with the least in flight
    GET  /v1/models, /v1/models/{id}                             answered here, from the route table

Nothing else reaches an engine, for engines expose unauthenticated control endpoints. `gateway.serve.auth` comes before this.

    what happens                                  what the client sees
    no engine takes the connection                the next replica, once; then 502 engine_unreachable
    the engine dies before its headers            502 engine_error; never tried again, it may have generated already
    the engine dies in an event stream            an event with the OpenAI error, then the end, never [DONE]
    the engine dies in any other answer           a broken transfer: the connection closes before the body is complete
    the client leaves, at whatever point          the connection to the engine closes at once
    the client reads slowly                       the engine is read as slowly; one chunk is held
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import BadRequest, EngineUnreachable, FitserveError, MethodNotAllowed, NotFound, UpstreamError
from gateway.serve.protocol import dump, read_body, read_fields, read_model, request_id, send_error, send_json, with_model
from gateway.serve.routes import ModelRoute, Replica, Routes
from gateway.serve.visit import Visit

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5
# Below the keep-alive of the engines' servers (uvicorn: 5 s), so that they never close a connection just as it is reused.
KEEPALIVE_S = 2

MODELS = "/v1/models"
TASKS = {"/v1/chat/completions": "generate", "/v1/completions": "generate", "/v1/embeddings": "embed"}
TO_ENGINE = (b"accept", b"traceparent", b"tracestate")
TO_CLIENT = (b"content-type", b"content-length", b"content-encoding", b"cache-control", b"retry-after")
PLAIN_VALUE = re.compile(rb"[\x20-\x7e]{0,512}")
EVENT_END = (b"\n\n", b"\r\n\r\n", b"\r\r")


@dataclass(frozen=True, slots=True)
class Call:
    """An inference request, read and checked. `headers` are those for the engine, `fields` those of `body`."""

    id: str
    path: str
    headers: list[tuple[bytes, bytes]]
    model: str
    body: bytes
    fields: dict[str, msgspec.Raw]

    def body_for(self, replica: Replica) -> bytes:
        return self.body if replica.served_name == self.model else with_model(self.fields, replica.served_name)


def new_client() -> httpx.AsyncClient:
    """The client for `OpenAI`: waits for an engine as long as the client waits for us. The caller closes it."""
    import httpx

    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEPALIVE_S),
        follow_redirects=False,
        trust_env=False,
    )


class OpenAI:
    """Serves every path under /v1. `client` is `new_client()`'s; it belongs to the event loop that runs this."""

    def __init__(self, routes: Routes, client: httpx.AsyncClient, body_limit_bytes: int) -> None:
        self._routes = routes
        self._client = client
        self._body_limit_bytes = body_limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        id_ = request_id(scope)
        path, method = scope["path"], scope["method"]
        allowed = "POST" if path in TASKS else "GET" if path == MODELS or path.startswith(f"{MODELS}/") else None
        try:
            if allowed is None:
                raise NotFound(
                    f"There is no {path[:200]} here.",
                    hint="Served are /v1/chat/completions, /v1/completions, /v1/embeddings and /v1/models.",
                )
            if method != allowed:
                error = MethodNotAllowed(f"{path[:200]} does not take {method}.", hint=f"Use {allowed}.")
                await send_error(send, error, id_, [(b"allow", allowed.encode())])
            elif allowed == "GET":
                await send_json(send, 200, self._models(path.removeprefix(MODELS).removeprefix("/")), id_)
            else:
                await self._infer(path, scope, receive, send, id_)
        except FitserveError as error:
            await send_error(send, error, id_)

    def _models(self, name: str) -> dict[str, object]:
        table = self._routes.table
        if not name:
            return {"object": "list", "data": [_model(route) for route in table.routed()]}
        route = table.find(name)
        if not route.replicas:
            raise route.not_ready()
        return _model(route)

    async def _infer(self, path: str, scope: Scope, receive: Receive, send: Send, id_: str) -> None:
        body = await read_body(scope, receive, self._body_limit_bytes)
        if body is None:
            return
        fields = read_fields(body)
        model = read_model(fields)
        route = self._routes.table.find(model)
        if route.task is not None and route.task != TASKS[path]:
            purpose = "makes embeddings" if route.task == "embed" else "generates text"
            raise BadRequest(
                f"The model '{model}' {purpose}, which {path} does not do.",
                hint="Use /v1/embeddings." if route.task == "embed" else "Use /v1/chat/completions or /v1/completions.",
                param="model",
            )
        call = Call(id_, path, _engine_headers(scope, id_), model, body, fields)
        visit = Visit(receive, send)
        await visit.run(self._forward(route, call, visit))

    async def _forward(self, route: ModelRoute, call: Call, visit: Visit) -> None:
        first = self._routes.pick(route)
        try:
            await self._exchange(first, call, visit)
        except EngineUnreachable:
            others = tuple(replica for replica in route.replicas if replica.id != first.id)
            if not others:
                raise
            await self._exchange(self._routes.pick(replace(route, replicas=others)), call, visit)

    async def _exchange(self, replica: Replica, call: Call, visit: Visit) -> None:
        """One request to one replica. Raises EngineUnreachable or UpstreamError as long as no response has started."""
        import httpx

        self._routes.begin(replica)
        try:
            try:
                url, content = replica.url + call.path, call.body_for(replica)
                request = httpx.Request("POST", url, headers=call.headers, content=content, extensions={"trace": visit.trace})
                response = await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                log.warning("%s: no connection to %s at %s: %r", call.id, replica.id, replica.url, error)
                raise EngineUnreachable(
                    "The engine of this model does not take connections.", hint="The gateway restarts it if it died; try again."
                ) from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                log.warning("%s: %s broke off before it answered: %r", call.id, replica.id, error)
                raise UpstreamError(
                    "The engine broke off before it answered.", hint="Try again; the engine's log says what happened to it."
                ) from None
            try:
                await _relay(response, replica, call.id, visit)
            finally:
                await response.aclose()
        finally:
            self._routes.end(replica)


async def _relay(response: httpx.Response, replica: Replica, id_: str, visit: Visit) -> None:
    import httpx

    if not (200 <= response.status_code < 300 or 400 <= response.status_code < 600):
        raise UpstreamError(
            f"The engine answered with status {response.status_code}, which is no answer to an inference request.",
            hint="Check that the model's endpoint is the address of an OpenAI-compatible server.",
        )
    events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
    headers = _client_headers(response, events, id_)
    await visit.send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    tail = b"\n\n"
    try:
        async for chunk in response.aiter_raw():
            await visit.send(_part(chunk))
            tail = (tail + chunk[-4:])[-4:]
    except httpx.HTTPError as error:
        log.warning("%s: %s broke off in its answer: %r", id_, replica.id, error)
        if not events:
            # An ASGI response that is never completed: the server closes the connection, so the client sees a broken transfer.
            return
        broken = UpstreamError("The engine broke off in its answer.", hint="Ask again; what came so far is incomplete.")
        between = b"" if tail.endswith(EVENT_END) else b"\n\n"
        await visit.send(_part(between + b"data: " + dump(broken.envelope()) + b"\n\n"))
    await visit.send(_part(b"", more=False))


def _part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _engine_headers(scope: Scope, id_: str) -> list[tuple[bytes, bytes]]:
    """The request's headers written anew: nothing of the client's goes through but what is named here."""
    kept = [(name, value) for name, value in scope["headers"] if name in TO_ENGINE and PLAIN_VALUE.fullmatch(value)]
    # The body was read as JSON, so it is sent as JSON, whatever the client called it.
    return [(b"content-type", b"application/json"), (b"accept-encoding", b"identity"), (b"x-request-id", id_.encode()), *kept]


def _client_headers(response: httpx.Response, events: bool, id_: str) -> list[tuple[bytes, bytes]]:
    raw = [(name.lower(), value) for name, value in response.headers.raw]
    kept = [(name, value) for name, value in raw if name in TO_CLIENT and PLAIN_VALUE.fullmatch(value)]
    if events:
        # An event stream has no length we could promise: it may end with our error event.
        kept = [(name, value) for name, value in kept if name != b"content-length"]
    return [*kept, (b"x-request-id", id_.encode()), (b"x-gateway-source", b"engine")]


def _model(route: ModelRoute) -> dict[str, object]:
    return {"id": route.name, "object": "model", "created": route.created, "owned_by": "fitserve"}
