"""The fields of a request's body that the data plane reads.

msgspec reads the types of the fields, which a compiled class does not keep. So this module stays
out of `scripts/compiled_wheel.py`.
"""

from __future__ import annotations

import msgspec

from gateway.errors import BadRequest

_NAME = msgspec.json.Decoder(str)
_NOTHING = msgspec.Raw(b"")
_MODELS_HINT = "GET /v1/models lists the served models."


class RequestFields(msgspec.Struct):
    """Fields that routing needs, as raw bytes. Of a repeated key the last counts."""

    model: msgspec.Raw = _NOTHING
    stream: msgspec.Raw = _NOTHING
    previous_response_id: msgspec.Raw = _NOTHING
    request_id: msgspec.Raw = _NOTHING
    store: msgspec.Raw = _NOTHING
    # read by the choice between replicas (`gateway.proxy.routing.balance`)
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    max_tokens: msgspec.Raw = _NOTHING
    max_completion_tokens: msgspec.Raw = _NOTHING
    max_output_tokens: msgspec.Raw = _NOTHING

    def name(self) -> str:
        """The name of the model. Raises BadRequest."""
        if self.model is _NOTHING:
            raise no_model()
        try:
            return _NAME.decode(self.model)
        except msgspec.DecodeError:
            raise BadRequest("`model` is not a string.", hint=_MODELS_HINT, param="model") from None

    def streams(self) -> bool:
        return bytes(self.stream) == b"true"

    def previous(self) -> str | None:
        """The id of the previous response, for /v1/responses."""
        if self.previous_response_id is _NOTHING:
            return None
        try:
            return _NAME.decode(self.previous_response_id)
        except msgspec.DecodeError:
            return None

    def stores(self) -> bool:
        """Whether the response is to be stored, which is the default of /v1/responses."""
        return bytes(self.store) != b"false"

    def has_own_id(self) -> bool:
        """Whether the client has chosen the id of the response."""
        return bytes(self.request_id) not in (b"", b"null")


class UsualFields(msgspec.Struct):
    """`RequestFields` of the usual case, decoded in one step: every field has its proper type."""

    model: str
    stream: bool | None = None
    previous_response_id: str | None = None
    request_id: str | None = None
    store: bool | None = None


class ToolFields(msgspec.Struct):
    """Fields that offer tools to a model, as raw bytes."""

    tools: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING


def no_model() -> BadRequest:
    return BadRequest("The request body has no `model`.", hint=_MODELS_HINT, param="model")
