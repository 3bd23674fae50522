"""Answers to GET /v1/models, rendered at most once for each route table and set of models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gateway.proxy.access.auth import Key
from gateway.proxy.api.protocol import dump
from gateway.proxy.routing.model_route import ModelRoute
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes

if TYPE_CHECKING:
    from gateway.proxy.transcripts.transcript_setup import TranscriptSetup

# Lists of keys with different models. More are rendered again.
_MAX_LISTS = 64
# Kinds of content in answers, by task.
_OUTPUTS = {
    "generate": ("text",),
    "transcribe": ("text",),
    "embed": ("embedding",),
    "rerank": ("score",),
    "classify": ("label",),
}


class ModelsList:
    """The lists by the models that a key may use (None for all), and whether it is recorded."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._table: RouteTable | None = None
        self._lists: dict[tuple[frozenset[str] | None, bool], bytes] = {}
        self.transcripts: TranscriptSetup | None = None
        """Whose requests are copied; None: of nobody."""

    def body(self, name: str, key: Key) -> bytes:
        """The answer for the model `name`, or for all models with an empty name. Raises
        ModelNotFound."""
        table = self._routes.table
        if name:
            return dump(models_answer(table, name, key, self.transcripts))
        if table is not self._table or len(self._lists) >= _MAX_LISTS:
            self._table = table
            self._lists = {}
        kind = key.models, key.is_recorded
        rendered = self._lists.get(kind)
        if rendered is None:
            answer = models_answer(table, name, key, self.transcripts)
            rendered = self._lists[kind] = dump(answer)
        return rendered


def models_answer(
    table: RouteTable, name: str, key: Key, transcripts: TranscriptSetup | None = None
) -> dict[str, Any]:
    """The answer to GET /v1/models: all models that `key` may use, in any state, or the model of
    that name. Fields of OpenAI and Anthropic stand side by side, for SDKs of both. Raises
    ModelNotFound.

    transcripts: whose requests are copied, which their entries say.
    """

    def entry(route: ModelRoute) -> dict[str, Any]:
        fields = _model_entry(route)
        model = route.alias_of or route.name
        if transcripts is not None and transcripts.covers(key, model):
            fields["recorded"] = True
        return fields

    if name:
        return entry(table.find(name, key))
    data = [entry(route) for route in table.models.values() if route.is_visible_to(key)]
    ends = (
        {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        if data
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": data, "has_more": False, **ends}


def _model_entry(route: ModelRoute) -> dict[str, Any]:
    card = route.card
    return {
        "id": route.name,
        "object": "model",
        "created": route.created,
        "owned_by": "fitserve",
        "type": "model",
        "display_name": route.name,
        "created_at": datetime.fromtimestamp(route.created, UTC).isoformat(),
        "state": route.state,
        "wait_s": route.wait_s,
        "task": route.task,
        **({"parent": route.alias_of, "root": card.adapter} if card.adapter else {}),
        "max_model_len": card.max_model_len,
        "modalities": {"input": card.inputs, "output": _OUTPUTS.get(route.task or "", ())},
        "tools": card.tools,
        "required_tools": card.required_tools,
        "reasoning": card.reasoning,
        "json_schema": card.json_schema,
    }
