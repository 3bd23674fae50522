"""What routing reads of a request's body, by kind: an object in JSON, a form, or nothing; and the
body with the model renamed."""

from __future__ import annotations

import msgspec

from gateway.errors import BadRequest
from gateway.proxy.access.auth import Key
from gateway.proxy.api.endpoints import Endpoint
from gateway.proxy.api.protocol import (
    no_model,
    read_fields,
    read_request_fields,
    read_usual_fields,
    with_model,
)
from gateway.proxy.bodies.multipart_form import PREFIX_BYTES, FormReader
from gateway.proxy.routing import balance
from gateway.proxy.routing.routes import Routes
from gateway.proxy.routing.table import Call, ModelRoute, RouteTable

Body = bytes | bytearray

# Whose bodies may offer tools.
_TAKES_TOOLS = frozenset({"chat", "responses", "messages"})
# Reading a body twice costs less than what the first, short look spares the most of them.
_SHORT_BYTES = 64 * 1024


def read_call(
    endpoint: Endpoint, form: FormReader | None, body: Body, routes: Routes, key: Key
) -> tuple[Call, ModelRoute, bytes]:
    """`form`: what has read the body, where that is a form. The call, the route of its model, and
    the header with which its body goes to the engine. Raises BadRequest, NotFound."""
    table = routes.table
    if endpoint.body == "json":
        # It was read as JSON, so it is sent as JSON, whatever the client called it.
        content = b"content-type: application/json\r\n"
        named = read_usual_fields(body) if len(body) < _SHORT_BYTES else None
        if named is not None:
            route = table.find(named.model, key)
            if len(route.replicas) < 2:
                call = Call(endpoint.name, named.model, body, named.stream is True)
                route = _by_its_name(call, route, table)
                if endpoint.name == "responses":
                    call.maker = _maker(
                        named.request_id is not None, named.previous_response_id, routes, key
                    )
                return call, route, content
        asked = read_request_fields(body)
        call = Call(endpoint.name, asked.name(), body, asked.streams())
        route = _by_its_name(call, table.find(call.model, key), table)
        if endpoint.name == "responses":
            call.maker = _maker(asked.names_itself(), asked.previous(), routes, key)
        if len(route.replicas) > 1:
            call.tokens, call.prefix = balance.weigh(asked, len(body)), balance.prefix(asked)
        return call, route, content
    if form is not None:
        if form.field is None:
            raise no_model()
        call = Call(endpoint.name, form.field.value)
        content = b'content-type: multipart/form-data; boundary="%b"\r\n' % form.boundary
    else:
        maker = routes.responses.maker_of(endpoint.id, key)
        call, content = Call(endpoint.name, routes.model_of(endpoint.id, maker), maker=maker), b""
    return call, _by_its_name(call, table.find(call.model, key), table), content


def _by_its_name(call: Call, route: ModelRoute, table: RouteTable) -> ModelRoute:
    """The route of the model itself, where the call has an alias: queues, limits and figures are
    the model's."""
    if route.alias_of:
        call.asked, call.model = call.model, route.alias_of
        route = table.find(route.alias_of)
    return route


class _ToolFields(msgspec.Struct):
    tools: msgspec.Raw = msgspec.Raw(b"")
    tool_choice: msgspec.Raw = msgspec.Raw(b"")


_TOOL_FIELDS = msgspec.json.Decoder(_ToolFields)


def check_tools(endpoint: Endpoint, body: Body, route: ModelRoute) -> None:
    """For a model that takes no tools. Raises BadRequest where the body offers some."""
    if endpoint.name not in _TAKES_TOOLS:
        return
    asked = _TOOL_FIELDS.decode(body)
    choice = bytes(asked.tool_choice)
    if bytes(asked.tools).strip(b" \t\r\n[]") in (b"", b"null") or b'"none"' in choice:
        return
    raise BadRequest(
        f"The model '{route.name}' cannot call tools here: {route.toolless.rstrip('.')}.",
        hint=(
            'Leave out `tools`, or ask a model whose `tools` is not "not proven" in GET'
            " /v1/models; where you know the parser of its calls, add it with --arg"
            f" tool-call-parser=NAME. `fitserve show {route.name}` tells more."
        ),
        param="tools",
    )


def _maker(names_itself: bool, previous: str | None, routes: Routes, key: Key) -> int | None:
    """The seed of the replica that made the response from which another one goes on. Raises
    NotFound, BadRequest."""
    if names_itself:
        # The engines take it as the response's id, and would write over another one of that id.
        raise BadRequest(
            "`request_id` would be the id of the response, which only the engine may choose.",
            hint="Leave it out; the header x-request-id may be chosen.",
            param="request_id",
        )
    return None if previous is None else routes.responses.maker_of(previous, key)


def may_stream(form: FormReader, size: int, routes: Routes, key: Key) -> bool:
    """Whether the `size` bytes that are here of a form are enough: the model is named in them, and
    is called the same by its engine.

    Never for JSON: the last `model` counts, and SDKs put it behind the messages.
    """
    route = (
        routes.table.models.get(form.field.value)
        if form.field is not None and size >= PREFIX_BYTES
        else None
    )
    return (
        route is not None
        and key.sees(route.name)
        and all(replica.served_name == route.name for replica in route.replicas)
    )


def renamed(endpoint: Endpoint, form: FormReader | None, body: Body, name: str) -> Body:
    """The body with the model called what the engine calls it. No other body is ever written
    anew."""
    if endpoint.body == "json":
        return with_model(read_fields(body), name)
    field = form.field if form is not None else None
    return (
        body if field is None else b"".join((body[: field.start], name.encode(), body[field.end :]))
    )
