"""HTTP and JSON of the data plane: request ids, the `model` field, answers, error envelopes.

An error has the form of the API that was called, OpenAI's or Anthropic's. `x-gateway-source:
gateway` marks an error of the gateway.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.decoding import DECODE_ERRORS
from gateway.errors import BadRequest, FitserveError, TooLarge
from gateway.proxy.api.endpoints import Shape
from gateway.proxy.api.request_fields import FIELDS, RequestFields, UsualFields

Headers = Iterable[tuple[bytes, bytes]]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_PREFIX = f"req_{secrets.token_hex(8)}"
_COUNT = itertools.count()
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_REQUEST_FIELDS = msgspec.json.Decoder(RequestFields)
_USUAL_FIELDS = msgspec.json.Decoder(UsualFields)
_OBJECT_HINT = "Send a JSON object in UTF-8 with `model` and the fields of the endpoint."


def new_id() -> str:
    """A unique id, not secret: a random number per process, and a count."""
    return f"{_PREFIX}{next(_COUNT)}"


def known_id(value: bytes | None) -> str | None:
    """The client's x-request-id if it is 1 to 128 visible ASCII characters."""
    return value.decode() if value is not None and _REQUEST_ID.fullmatch(value) else None


def request_id(scope: Scope) -> str:
    """The client's valid x-request-id, or a new id."""
    return (
        known_id(next((value for key, value in scope["headers"] if key == b"x-request-id"), None))
        or new_id()
    )


def read_usual_fields(body: bytes | bytearray) -> UsualFields | None:
    """The usual fields, faster than `read_request_fields`. None where only `read_request_fields`
    can read the body."""
    try:
        if not body.isascii():
            body.decode()
        return _USUAL_FIELDS.decode(body)
    except DECODE_ERRORS:
        return None


def read_request_fields(body: bytes | bytearray) -> RequestFields:
    """Fields that routing needs of a JSON object. Raises BadRequest.

    Of a repeated key the last counts, because engines read bodies with Python's json: both must see
    the same model.
    """
    fields: RequestFields = _decode_body(body, _REQUEST_FIELDS)
    return fields


def read_fields(body: bytes | bytearray) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, each value as raw bytes. Of a repeated key the last counts.
    Raises BadRequest."""
    fields: dict[str, msgspec.Raw] = _decode_body(body, FIELDS)
    return fields


def _decode_body(body: bytes | bytearray, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        if not body.isascii():
            body.decode()  # msgspec leaves values raw and does not check their UTF-8
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise BadRequest(
            "The request body is JSON, but not an object.", hint=_OBJECT_HINT
        ) from None
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.", hint=_OBJECT_HINT) from None
    except DECODE_ERRORS as error:
        raise BadRequest(f"The request body is not JSON ({error}).", hint=_OBJECT_HINT) from None


def replace_model(fields: Mapping[str, msgspec.Raw], name: str) -> bytes:
    """The body with `model` replaced; every other value keeps its bytes."""
    return msgspec.json.encode({**fields, "model": name})


def drop_store(fields: Mapping[str, msgspec.Raw]) -> bytes:
    """The body of a request whose response is not stored; every other value keeps its bytes."""
    return msgspec.json.encode({**fields, "store": False})


def too_large_error(limit_bytes: int) -> TooLarge:
    return TooLarge(
        f"The request body is over {limit_bytes} bytes.",
        hint="Send a smaller body, or raise FITSERVE_BODY_LIMIT_BYTES.",
    )


def file_too_large_error(limit_bytes: int) -> TooLarge:
    return TooLarge(
        f"The file is over {limit_bytes:,} bytes.",
        hint="Send several smaller files, or ask the operator to raise FITSERVE_BATCH_FILE_BYTES.",
        param="file",
    )


def dump(value: Any) -> bytes:
    # json rather than msgspec: json escapes lone surrogates, which a hostile name may contain and
    # UTF-8 cannot.
    return json.dumps(value, separators=(",", ":")).encode()


def envelope(error: FitserveError, shape: Shape) -> dict[str, Any]:
    """The body of an error in the form of that API."""
    if shape == "openai":
        return error.envelope()
    return {
        "type": "error",
        "error": {"type": anthropic_type(error.status), "message": str(error)},
    }


def anthropic_type(status: int) -> str:
    """The type of Anthropic's errors with the status."""
    return _ANTHROPIC_TYPES.get(status, "api_error")


def error_event(error: FitserveError, shape: Shape) -> bytes:
    """The event that ends an incomplete stream."""
    return named_event(dump(envelope(error, shape)), shape)


def named_event(body: bytes, shape: Shape) -> bytes:
    """The body of an error, on one line, as an event."""
    return b"%bdata: %b\n\n" % (b"event: error\n" if shape == "anthropic" else b"", body)


def error_headers(error: FitserveError) -> list[tuple[bytes, bytes]]:
    headers = list(error.headers)
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if error.allow is not None:
        headers.append((b"allow", error.allow.encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.is_permanent:
        # Anthropic's header. The SDKs of OpenAI and Anthropic retry or not by its value
        # (`_should_retry` in their _base_client.py). Without it Claude Code asks eleven times with
        # a wrong key, for three minutes.
        headers.append((b"x-should-retry", b"false"))
    return headers


def answer(status: int, body: bytes, id_: str, headers: Headers) -> bytes:
    """A complete answer of the gateway itself. `headers` are added to those of every such
    answer."""
    head = [
        STATUS_LINE[status],
        b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id:"
        b" %b\r\nx-gateway-source: gateway\r\n" % (len(body), id_.encode()),
    ]
    head += [b"%b: %b\r\n" % pair for pair in headers]
    return b"".join((*head, b"\r\n", body))


async def send_error(send: Send, error: FitserveError, request_id: str) -> None:
    """Answer over ASGI with the error's envelope and status. Only for a response that has not
    started."""
    body = dump(error.envelope())
    start = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode()),
        (b"x-gateway-source", b"gateway"),
        *error_headers(error),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": start})
    await send({"type": "http.response.body", "body": body})
