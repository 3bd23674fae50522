"""The fields of a request's body that routing needs, and the body with another model name."""

from __future__ import annotations

import msgspec

from gateway.errors import BadRequest
from gateway.proxy.access.auth import Key
from gateway.proxy.api.endpoints import Endpoint
from gateway.proxy.api.protocol import (
    drop_store,
    read_fields,
    read_request_fields,
    read_usual_fields,
    replace_model,
)
from gateway.proxy.api.request_fields import ToolFields, missing_model_error
from gateway.proxy.bodies.multipart_form import PREFIX_BYTES, FormReader
from gateway.proxy.routing import balance
from gateway.proxy.routing.call import Call
from gateway.proxy.routing.model_route import ModelRoute
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes

Body = bytes | bytearray

# Endpoints whose bodies may offer tools.
_TAKES_TOOLS = frozenset({"chat", "responses", "messages"})
# Bodies below this size are decoded in one step first, which is enough for most of them.
_SHORT_BYTES = 64 * 1024


def read_call(
    endpoint: Endpoint, form: FormReader | None, body: Body, routes: Routes, key: Key
) -> tuple[Call, ModelRoute, bytes]:
    """The call, the route of its model, and the header of its body for the engine. `form`: the
    reader of a form body. Raises BadRequest, NotFound."""
    table = routes.table
    if endpoint.body == "json":
        # The body was read as JSON, so it is sent as JSON, even if the client's content type
        # differs.
        content = b"content-type: application/json\r\n"
        named_fields = read_usual_fields(body) if len(body) < _SHORT_BYTES else None
        if named_fields is not None:
            route = table.find(named_fields.model, key)
            if len(route.replicas) < 2:
                call = Call(endpoint.name, named_fields.model, body, named_fields.stream is True)
                if named_fields.n:
                    call.choices = named_fields.n
                route = _resolve_alias(call, route, table)
                if endpoint.name == "responses":
                    call.maker = _maker(
                        named_fields.request_id is not None,
                        named_fields.previous_response_id,
                        routes,
                        key,
                    )
                    call.stores_answer = named_fields.store is not False
                return call, route, content
        fields = read_request_fields(body)
        call = Call(endpoint.name, fields.name(body), body, fields.streams())
        call.choices = fields.choices()
        route = _resolve_alias(call, table.find(call.model, key), table)
        if endpoint.name == "responses":
            call.maker = _maker(fields.has_own_id(), fields.previous(), routes, key)
            call.stores_answer = fields.stores()
        if len(route.replicas) > 1:
            call.tokens = balance.estimate_tokens(fields, len(body))
            call.prefix = balance.prefix(fields)
        return call, route, content
    if form is not None:
        if form.field is None:
            raise missing_model_error()
        call = Call(endpoint.name, form.field.value)
        content = b'content-type: multipart/form-data; boundary="%b"\r\n' % form.boundary
    else:
        maker = routes.responses.maker_of(endpoint.id, key)
        call = Call(endpoint.name, routes.model_of(endpoint.id, maker), maker=maker)
        content = b""
    return call, _resolve_alias(call, table.find(call.model, key), table), content


def _resolve_alias(call: Call, route: ModelRoute, table: RouteTable) -> ModelRoute:
    """The route of the model itself where the call uses an alias: queues, limits and metrics belong
    to the model."""
    if route.alias_of:
        call.requested_name = call.model
        call.model = route.alias_of
        route = table.find(route.alias_of)
    return route


_TOOL_FIELDS = msgspec.json.Decoder(ToolFields)


def check_tools(endpoint: Endpoint, body: Body, route: ModelRoute) -> None:
    """Refuse tools for a model that cannot call them. Raises BadRequest."""
    if endpoint.name not in _TAKES_TOOLS:
        return
    fields = _TOOL_FIELDS.decode(body)
    choice = bytes(fields.tool_choice)
    if bytes(fields.tools).strip(b" \t\r\n[]") in (b"", b"null") or b'"none"' in choice:
        return
    raise BadRequest(
        f"The model '{route.name}' cannot call tools here: {route.toolless.rstrip('.')}.",
        hint=(
            'Remove `tools`, or use a model whose `tools` is not "not proven" in GET'
            " /v1/models. If you know the parser of its calls, add the model with --arg"
            f" tool-call-parser=NAME. `fitserve show {route.name}` has details."
        ),
        param="tools",
    )


def _maker(has_own_id: bool, former_maker: str | None, routes: Routes, key: Key) -> int | None:
    """Seed of the replica that made the previous response. Raises NotFound, BadRequest."""
    if has_own_id:
        # Engines take it as the id of the response, and would overwrite another response of that
        # id.
        raise BadRequest(
            "`request_id` sets the id of the response, which only the engine may choose.",
            hint="Remove `request_id`; the header x-request-id may be chosen freely.",
            param="request_id",
        )
    return None if former_maker is None else routes.responses.maker_of(former_maker, key)


def may_stream(form: FormReader, size: int, routes: Routes, key: Key) -> bool:
    """Whether `size` bytes of a form are enough to start: they name the model, and its engine uses
    the same name.

    Never for JSON: the last `model` counts, and SDKs put it after the messages.
    """
    route = (
        routes.table.models.get(form.field.value)
        if form.field is not None and size >= PREFIX_BYTES
        else None
    )
    return (
        route is not None
        and key.may_use(route.name)
        and all(replica.served_name == route.name for replica in route.replicas)
    )


def replace_model_name(endpoint: Endpoint, form: FormReader | None, body: Body, name: str) -> Body:
    """The body with the engine's name for the model."""
    if endpoint.body == "json":
        return replace_model(read_fields(body), name)
    field = form.field if form is not None else None
    return (
        body if field is None else b"".join((body[: field.start], name.encode(), body[field.end :]))
    )


def drop_storage(body: Body) -> bytes:
    """The body of a request to /v1/responses whose response the engine does not keep."""
    return drop_store(read_fields(body))
