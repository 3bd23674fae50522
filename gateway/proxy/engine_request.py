"""The head and the body of a request as an engine receives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.proxy.bodies import engine_priority, request_body, thoughts
from gateway.proxy.bodies.request_body import Body
from gateway.proxy.heads import FIRST_VIA_LINE, gateway_hops, request_head, via_line
from gateway.proxy.routing.model_route import RoutedReplica
from gateway.proxy.upstream_pool import UpstreamPool

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange


def engine_request(
    exchange: Exchange, replica: RoutedReplica, pool: UpstreamPool
) -> tuple[bytes, Body, bool]:
    """The head and the received body for the engine, with the replica's name for the model, and
    whether its thoughts have another name. Raises BadRequest."""
    endpoint = exchange.endpoint
    call = exchange.call
    upload = exchange.upload
    headers = exchange.request_head.headers
    body = upload.body
    description = exchange.content_type + replica.key_line
    if replica.is_remote:
        description += via_line(gateway_hops(headers)) if b"via" in headers else FIRST_VIA_LINE
    name = replica.name_of(call.requested_name) if replica.adapters else replica.served_name
    if name != (call.requested_name or call.model):
        body = request_body.replace_model_name(endpoint, upload.form, body, name)
    renames = replica.thoughts != thoughts.NAME and endpoint.name == "chat"
    if renames:
        body = thoughts.rename_for_engine(body)
    if (
        call.stores_answer
        and not replica.is_remote
        and exchange.plane.routes.responses.is_full(replica.seed)
    ):
        call.stores_answer = False
        body = request_body.drop_storage(body)
    if replica.priority_factor and endpoint.name in engine_priority.ENDPOINTS:
        priority = call.priority if call.engine_priority is None else call.engine_priority
        if (
            priority
            or not replica.has_default_priority
            or not engine_priority.has_no_priority(body)
        ):
            body = engine_priority.set_priority(body, priority, replica.priority_factor)
    if upload.is_whole:
        if endpoint.method == "POST":
            description += b"content-length: %d\r\n" % len(body)
    elif (announced := headers.get(b"content-length")) is not None:
        description += b"content-length: %d\r\n" % (int(announced) + len(body) - len(upload.body))
    else:
        description += b"transfer-encoding: chunked\r\n"
        body = b"%x\r\n%b\r\n" % (len(body), bytes(body))
    id_ = exchange.answer.id
    lines = exchange.request_head.forwarded_headers
    head = request_head(endpoint, pool.prefix, pool.authority, id_, description, lines)
    return head, body, renames
