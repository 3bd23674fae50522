"""Errors of the data plane that belong to no single limit."""

from __future__ import annotations

from gateway.errors import (
    BadRequest,
    Busy,
    Cancelled,
    EngineUnreachable,
    FitserveError,
    LoopDetected,
    NotReady,
    TooSlow,
    UpstreamError,
)


def connection_error() -> EngineUnreachable:
    return EngineUnreachable(
        "The engine of this model does not accept connections.",
        hint="The gateway restarts it if it died; try again.",
    )


def frozen_engine_error() -> NotReady:
    return NotReady(
        "The engine of this model has stopped answering.",
        hint="The gateway replaces it unless it resumes; try again.",
        retry_after_s=10,
    )


def frozen_answer_error() -> UpstreamError:
    return UpstreamError(
        "The engine stopped in the middle of its answer.",
        hint="Send the request again; the answer so far is incomplete.",
    )


def engine_end_error() -> UpstreamError:
    return UpstreamError(
        "The engine broke off before it answered.",
        hint="Try again; the engine's log has the cause.",
    )


def broken_answer_error() -> UpstreamError:
    return UpstreamError(
        "The engine broke off in its answer.",
        hint="Send the request again; the answer so far is incomplete.",
    )


def incomplete_stream_error() -> UpstreamError:
    return UpstreamError(
        "The engine ended its stream without the end of its answer.",
        hint="Send the request again; the answer so far is incomplete.",
    )


def status_error(status: int) -> UpstreamError:
    return UpstreamError(
        f"The engine answered with status {status}, which is not an answer to an inference "
        "request.",
        hint="Check that the model's endpoint is the address of an OpenAI-compatible server.",
    )


def engine_key_error(*, has_key: bool) -> UpstreamError:
    """`has_key`: the gateway has one for the engine. The client's own key was good, and the
    engine's words may repeat the gateway's."""
    reason = (
        "refused the key of the gateway"
        if has_key
        else "wants a key, and the gateway has none for it"
    )
    return UpstreamError(
        f"The engine of this model {reason}.",
        hint="Your own key is valid. The operator sees more with `fitserve show`.",
    )


def loop_error(model: str, hops: int) -> LoopDetected:
    return LoopDetected(
        f"This request has passed {hops} gateways; the endpoints of {model} may form a loop.",
        hint="The operator sees the endpoints of each gateway with `fitserve show`.",
    )


# --- of the gateway ---


def cancellation_error() -> Cancelled:
    return Cancelled(
        "The operator of this gateway ended this request.",
        hint="Ask the operator before you send it again.",
    )


def revocation_error() -> Cancelled:
    return Cancelled(
        "The key of this request was revoked, or may no longer use its model.",
        hint="Send the request again with another key.",
    )


def shutdown_error() -> NotReady:
    return NotReady("The gateway is stopping.", hint="Try again in a moment.", retry_after_s=5)


def internal_error() -> FitserveError:
    """The error of an internal fault."""
    return FitserveError(
        "The gateway failed to handle this request.",
        hint="Send it again. The operator finds the cause in the gateway's log.",
    )


def connection_limit_error() -> Busy:
    return Busy(
        "The gateway has too many connections.", hint="Try again in a second.", retry_after_s=1
    )


def memory_error() -> Busy:
    return Busy(
        "The gateway has no memory for this request.",
        hint="Try again in a second.",
        retry_after_s=1,
    )


# --- of the client ---


def protocol_error() -> BadRequest:
    return BadRequest(
        "The bytes received are not an HTTP request.",
        hint="Check the client and any proxy before the gateway.",
    )


def websocket_error() -> BadRequest:
    return BadRequest(
        "WebSockets are not supported.", hint='Send "stream": true to receive events.'
    )


def pipeline_error() -> BadRequest:
    return BadRequest("Too many requests wait on this connection.", hint="Use more connections.")


def slow_request_error() -> TooSlow:
    return TooSlow("The request did not arrive in time.", hint="Send it without pauses.")
