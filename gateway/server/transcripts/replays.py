"""Requests of transcripts that are sent to another model, to compare the answers.

A replay goes to the data plane like a line of a batch: in the name of the operator's key, and after
requests that people wait for.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import ConfigDict, Field

from gateway.domain import Value
from gateway.errors import BadRequest
from gateway.keys import hash_key
from gateway.proxy.access.auth import ANONYMOUS_KEY, Key
from gateway.proxy.meter import answer_usage
from gateway.proxy.upstream_connection import TAIL_BYTES
from gateway.secret import Secret
from gateway.server.batches.line_client import LineClient, LineReply
from gateway.server.batches.own_connections import OwnConnections
from gateway.server.transcripts.answer_text import answer_text
from gateway.server.transcripts.transcript_views import TranscriptView

if TYPE_CHECKING:
    from gateway.server.gateway_app import GatewayApp
    from gateway.server.gateway_parts import ServingParts

_UNAUTHORIZED_STATUS = 401
# A worker gets a new token within milliseconds.
_TOKEN_TRIES = 50
_TOKEN_REST_S = 0.1
# Fields of a request that only a stream has.
_STREAM_FIELDS = ("stream", "stream_options")


class NewReplay(Value):
    """The model for a replay."""

    # FastAPI reads the model of a body before it validates anything.
    model_config = ConfigDict(defer_build=False)

    model: str = Field(min_length=1, max_length=200, description="the model that answers now")


class ReplayView(Value):
    """The answer of another model to a request of a transcript."""

    transcript: TranscriptView
    model: str
    status: int
    answer: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    duration_s: float
    is_exact: bool = Field(
        description="whether the request is the recorded one; False: parts of it were removed"
    )


class Replays:
    """Sends requests of transcripts to the data plane of this gateway."""

    def __init__(self, app: GatewayApp, front: ServingParts) -> None:
        self._front = front
        self._client = LineClient(OwnConnections(app, front.workers).open)
        self._tokens: dict[bytes, Secret] = {}

    async def replay(self, view: TranscriptView, model: str, caller: Key) -> ReplayView:
        """Send the request to a model, without a stream. Raises BadRequest where the transcript
        has no request, and the errors of `LineClient.send`."""
        if not isinstance(view.request, dict) or "model" not in view.request:
            raise BadRequest(
                "This transcript has no request that can be sent again.",
                hint="`fitserve transcripts show ID` says in its notes why the request is absent.",
                param="id",
            )
        body = _replay_body(view.request, model)
        started_s = time.monotonic()
        reply = await self._send(view.path, body, self._token_of(caller))
        prompt, completion, _ = answer_usage((reply.body[-TAIL_BYTES:],))
        return ReplayView(
            transcript=view,
            model=model,
            status=reply.status,
            answer=answer_text(reply.body, is_stream=False),
            prompt_tokens=prompt,
            completion_tokens=completion,
            duration_s=time.monotonic() - started_s,
            is_exact=not view.notes and b"[redacted]" not in body,
        )

    def close(self) -> None:
        self._client.close()

    async def _send(self, path: str, body: bytes, token: Secret | None) -> LineReply:
        for _ in range(_TOKEN_TRIES):
            reply = await self._client.send(path, body, token)
            if reply.status != _UNAUTHORIZED_STATUS:
                break
            await asyncio.sleep(_TOKEN_REST_S)
        return reply

    def _token_of(self, caller: Key) -> Secret | None:
        """A token for requests in the name of the caller; None: the gateway has no keys."""
        if caller is ANONYMOUS_KEY:
            return None
        token = self._tokens.get(caller.account)
        if token is None or hash_key(token) not in self._front.keys.table.keys:
            token = self._tokens[caller.account] = self._front.keys.issue_token(caller)
            if self._front.workers is not None:
                self._front.workers.publish_keys()
        return token


def _replay_body(request: dict[str, Any], model: str) -> bytes:
    fields = {name: value for name, value in request.items() if name not in _STREAM_FIELDS}
    return msgspec.json.encode({**fields, "model": model})
