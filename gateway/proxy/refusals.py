"""What the data plane says when it cannot answer, or has to stop: the errors that belong to no
single limit."""

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

# --- of the engine ---


def no_connection() -> EngineUnreachable:
    return EngineUnreachable(
        "The engine of this model does not take connections.",
        hint="The gateway restarts it if it died; try again.",
    )


def frozen() -> NotReady:
    return NotReady(
        "The engine of this model has stopped answering.",
        hint="The gateway replaces it unless it goes on; try again.",
        retry_after_s=10,
    )


def frozen_in_answer() -> UpstreamError:
    return UpstreamError(
        "The engine has stopped in its answer.", hint="Ask again; what came so far is incomplete."
    )


def broke_off() -> UpstreamError:
    return UpstreamError(
        "The engine broke off before it answered.",
        hint="Try again; the engine's log says what happened to it.",
    )


def broke_off_in_answer() -> UpstreamError:
    return UpstreamError(
        "The engine broke off in its answer.", hint="Ask again; what came so far is incomplete."
    )


def no_answer(status: int) -> UpstreamError:
    return UpstreamError(
        f"The engine answered with status {status}, which is no answer to an inference request.",
        hint="Check that the model's endpoint is the address of an OpenAI-compatible server.",
    )


def unauthorized(*, key: bool) -> UpstreamError:
    """`key`: the gateway has one for the engine. The client's own key was good, and the engine's
    words may repeat the gateway's."""
    why = (
        "refused the key of the gateway" if key else "wants a key, and the gateway has none for it"
    )
    return UpstreamError(
        f"The engine of this model {why}.",
        hint=(
            "It is not your key that is meant; whoever runs the gateway sees more with `fitserve"
            " show`."
        ),
    )


def loops(model: str, hops: int) -> LoopDetected:
    return LoopDetected(
        f"This request has passed {hops} gateways, and the endpoints of {model} lead on: perhaps"
        " back here.",
        hint="Whoever runs them finds the endpoints of each with `fitserve show`.",
    )


# --- of the gateway ---


def cancelled() -> Cancelled:
    return Cancelled(
        "Whoever runs this gateway has ended this request.",
        hint="Ask them before you send it again.",
    )


def stops() -> NotReady:
    return NotReady("The gateway stops.", hint="Ask again in a moment.", retry_after_s=5)


def failed() -> FitserveError:
    """A bug."""
    return FitserveError("The gateway failed at this request.", hint="Its log says why.")


def too_many_connections() -> Busy:
    return Busy(
        "The gateway has too many connections.", hint="Try again in a second.", retry_after_s=1
    )


def no_memory() -> Busy:
    return Busy(
        "The gateway has no memory for this request.",
        hint="Try again in a second.",
        retry_after_s=1,
    )


# --- of the client ---


def not_http() -> BadRequest:
    return BadRequest(
        "What was sent is not an HTTP request.",
        hint="Check the client, and what is between it and here.",
    )


def no_websockets() -> BadRequest:
    return BadRequest(
        "There are no websockets here.", hint='Ask with "stream": true for events as they come.'
    )


def too_many_ahead() -> BadRequest:
    return BadRequest("Too many requests wait on this connection.", hint="Use more connections.")


def too_slow() -> TooSlow:
    return TooSlow("The request did not come in within its time.", hint="Send it without pauses.")
