"""The fields of a request's body that the data plane reads.

msgspec reads the types of the fields, which a compiled class does not keep. So this module stays
out of `scripts/compiled_wheel.py`.
"""

from __future__ import annotations

import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.errors import BadRequest, near_name

_NAME = msgspec.json.Decoder(str)
_NO_VALUE = msgspec.Raw(b"")
# Most characters of a misspelt field in an error.
_MAX_NAME_CHARACTERS = 60
_MODELS_HINT = "GET /v1/models lists the served models."


class RequestFields(msgspec.Struct):
    """Fields that routing needs, as raw bytes. Of a repeated key the last counts."""

    model: msgspec.Raw = _NO_VALUE
    stream: msgspec.Raw = _NO_VALUE
    previous_response_id: msgspec.Raw = _NO_VALUE
    request_id: msgspec.Raw = _NO_VALUE
    store: msgspec.Raw = _NO_VALUE
    n: msgspec.Raw = _NO_VALUE
    # read by the choice between replicas (`gateway.proxy.routing.balance`)
    system: msgspec.Raw = _NO_VALUE
    instructions: msgspec.Raw = _NO_VALUE
    messages: msgspec.Raw = _NO_VALUE
    prompt: msgspec.Raw = _NO_VALUE
    input: msgspec.Raw = _NO_VALUE
    max_tokens: msgspec.Raw = _NO_VALUE
    max_completion_tokens: msgspec.Raw = _NO_VALUE
    max_output_tokens: msgspec.Raw = _NO_VALUE

    def name(self, body: bytes | bytearray) -> str:
        """The name of the model in the body. Raises BadRequest."""
        if self.model is _NO_VALUE:
            raise missing_model_error(body)
        try:
            return _NAME.decode(self.model)
        except DECODE_ERRORS:
            raise BadRequest("`model` is not a string.", hint=_MODELS_HINT, param="model") from None

    def streams(self) -> bool:
        return bytes(self.stream) == b"true"

    def previous(self) -> str | None:
        """The id of the previous response, for /v1/responses."""
        if self.previous_response_id is _NO_VALUE:
            return None
        try:
            return _NAME.decode(self.previous_response_id)
        except DECODE_ERRORS:
            return None

    def stores(self) -> bool:
        """Whether the response is to be stored, which is the default of /v1/responses."""
        return bytes(self.store) != b"false"

    def choices(self) -> int:
        """The number of answers that the client asks for."""
        digits = bytes(self.n)
        return int(digits[:9]) if digits.isdigit() else 1

    def has_own_id(self) -> bool:
        """Whether the client has chosen the id of the response."""
        return bytes(self.request_id) not in (b"", b"null")


class UsualFields(msgspec.Struct):
    """The fields of a body in the usual case.

    Every field has its proper type, so one step decodes all.
    """

    model: str
    stream: bool | None = None
    previous_response_id: str | None = None
    request_id: str | None = None
    store: bool | None = None
    n: int | None = None


class ToolFields(msgspec.Struct):
    """Fields that offer tools to a model, as raw bytes."""

    tools: msgspec.Raw = _NO_VALUE
    tool_choice: msgspec.Raw = _NO_VALUE


def missing_model_error(body: bytes | bytearray = b"") -> BadRequest:
    """The error for a request without a model. body: in JSON; empty for a form."""
    misspelt = near_field("model", body)
    hint = f"Did you mean `model` instead of `{misspelt}`? " if misspelt else ""
    return BadRequest(
        "The request body has no `model`.", hint=f"{hint}{_MODELS_HINT}", param="model"
    )


FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def near_field(name: str, body: bytes | bytearray) -> str:
    """The field of a JSON body that was probably meant to be this one; "": the body has the field,
    or none of a near name."""
    try:
        fields = FIELDS.decode(body)
    except DECODE_ERRORS:
        return ""
    return "" if name in fields else near_name(name, fields)[:_MAX_NAME_CHARACTERS]
