"""HTTP and JSON as the data plane speaks them: request ids, capped bodies, the `model` field, error envelopes.

The envelope of every error the gateway itself answers is OpenAI's; `x-gateway-source: gateway` tells it from an engine's.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.errors import BadRequest, FitserveError, TooLarge

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAME = msgspec.json.Decoder(str)


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def request_id(scope: Scope) -> str:
    """The client's x-request-id when it is 1 to 128 visible ASCII characters, else a new one."""
    value = header(scope, b"x-request-id")
    if value is not None and _REQUEST_ID.fullmatch(value):
        return value.decode()
    return f"req_{secrets.token_hex(12)}"


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes | None:
    """The whole body; None when the client left before it was complete. Raises TooLarge as soon as it is over the limit."""
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, each value still in its own bytes; of a repeated key the last counts. Raises BadRequest.

    The last counts because engines read bodies with Python's json: both must see the same model.
    """
    hint = "Send a JSON object in UTF-8 with `model` and the fields of the endpoint."
    try:
        body.decode()  # values stay raw below, and msgspec does not look into those
        return _FIELDS.decode(body)
    except msgspec.ValidationError:
        raise BadRequest("The request body is JSON, but not an object.", hint=hint) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The request body is not JSON ({error}).", hint=hint) from None
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.", hint=hint) from None


def read_model(fields: Mapping[str, msgspec.Raw]) -> str:
    """The `model` field. Raises BadRequest."""
    hint = "GET /v1/models lists the models that are served."
    if "model" not in fields:
        raise BadRequest("The request body has no `model`.", hint=hint, param="model")
    try:
        return _NAME.decode(fields["model"])
    except msgspec.DecodeError:
        raise BadRequest("`model` is not a string.", hint=hint, param="model") from None


def with_model(fields: Mapping[str, msgspec.Raw], name: str) -> bytes:
    """The body with `model` replaced; every other value keeps its bytes."""
    return msgspec.json.encode({**fields, "model": name})


def dump(value: Any) -> bytes:
    # json rather than msgspec: it escapes what a hostile name may hold and UTF-8 cannot (lone surrogates).
    return json.dumps(value, separators=(",", ":")).encode()


async def send_json(send: Send, status: int, value: Any, request_id: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    body = dump(value)
    start = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode()),
        (b"x-gateway-source", b"gateway"),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: FitserveError, request_id: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Answers with the error's envelope and status. Only for a response that has not started."""
    more = list(headers)
    if error.retry_after_s is not None:
        more.append((b"retry-after", b"%d" % error.retry_after_s))
    if error.status == 401:
        more.append((b"www-authenticate", b"Bearer"))
    await send_json(send, error.status, error.envelope(), request_id, more)


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"The request body is over {limit_bytes} bytes.", hint="Send less, or raise FITSERVE_BODY_LIMIT_BYTES.")
