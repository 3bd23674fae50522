"""Every error a user can meet: one tree. The class carries the HTTP status, the OpenAI error type
and a code.

A message says what happened and why; `hint` says what to do next. Both reach the user, in the CLI
and over HTTP.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

# Request timeout, conflict, too many: another try may be answered.
_PASSING = frozenset({408, 409, 429})
_LONGEST = 200


def in_brief(error: BaseException) -> str:
    """What an error of the network says, without numbers and addresses: `Connection refused`. The
    name of its type where it says nothing."""
    # asyncio names each address that it tried.
    if numbers := re.findall(r"\[Errno (\d+)\] Connect call failed", str(error)):
        return ", ".join(dict.fromkeys(os.strerror(int(number)) for number in numbers))
    said = getattr(error, "strerror", None) or re.sub(r"^\[Errno -?\d+\] ", "", str(error))
    return str(said).partition("\n")[0][:_LONGEST].rstrip(". ") or type(error).__name__


class FitserveError(Exception):
    """Base of all expected errors. Any other exception is a bug, and is answered with a bare
    500."""

    status = 500
    type = "api_error"
    code = "internal_error"
    exit_code = 1
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow  # the method that would do, for MethodNotAllowed

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    @property
    def lasting(self) -> bool:
        """Whether the same request meets the same error until somebody changes something, however
        often it is sent."""
        return 400 <= self.status < 500 and self.status not in _PASSING

    def envelope(self) -> dict[str, Any]:
        """The OpenAI error body."""
        return {
            "error": {
                "message": str(self),
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class BadRequest(FitserveError):
    """The request cannot be right, whatever the state of the gateway."""

    status = 400
    type = "invalid_request_error"
    code = "bad_request"
    exit_code = 2


class BadModel(BadRequest):
    """The model folder or repository cannot be read as a model."""

    code = "bad_model"
    exit_code = 1


class NeedsRemoteCode(BadModel):
    """The repository holds code that an engine would run, and the user has not allowed that."""

    code = "needs_remote_code"

    @classmethod
    def of(cls, source: str, found: Sequence[str]) -> Self:
        return cls(
            f"{source} has code of its own that the engine would run: {', '.join(found[:5])}.",
            hint="Add it with policy.allow_remote_code=true if you trust it, pinned to a commit.",
        )


class BadFlag(BadRequest):
    """An engine flag or variable that the engine version does not have, or that may not be set."""

    code = "bad_flag"


class Unauthorized(FitserveError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(FitserveError):
    """A good key that may not do this."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class Cancelled(FitserveError):
    """An operator has ended the request. 403, because clients ask again by themselves after 408,
    409, 429 and 5xx (openai 3.52.0, `_should_retry`)."""

    status = 403
    type = "permission_error"
    code = "cancelled"


class NotFound(FitserveError):
    """No such model, route or engine."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    """The `model` of a request is not one we serve."""

    code = "model_not_found"


class MethodNotAllowed(FitserveError):
    """The path exists, but not for this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


def no_model(name: str, known: Mapping[str, str]) -> NotFound:
    """known: names of models by every name that they have."""
    near = difflib.get_close_matches(name[:_LONGEST], known, 1)
    hint = f"Did you mean {known[near[0]]}? " if near else ""
    return NotFound(
        f"There is no model {name[:_LONGEST]}.", hint=f"{hint}`fitserve ps` lists the models."
    )


class Conflict(FitserveError):
    """The name is taken, or the thing is in a state that does not allow this."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class TooLarge(FitserveError):
    """The body is over the limit."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class HeadTooLarge(FitserveError):
    """Target and headers of the request are over the limit."""

    status = 431
    type = "invalid_request_error"
    code = "head_too_large"


class TooSlow(FitserveError):
    """The request did not come in within its time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Busy(FitserveError):
    """The gateway has as many connections as it may have."""

    status = 503
    type = "service_unavailable"
    code = "busy"


class RateLimited(FitserveError):
    """The key has used up its limit, or wrong keys came too often. `headers` tell clients how much
    is left."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Overloaded(FitserveError):
    """Every replica of the model has as many requests as it takes at once, and as many wait as
    may."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class NoPlan(FitserveError):
    """No engine setting can run this model on this hardware; the decision lists why."""

    status = 422
    type = "invalid_request_error"
    code = "no_plan"
    exit_code = 3


class NotReady(FitserveError):
    """The model is known, but no replica of it can answer now."""

    status = 503
    type = "service_unavailable"
    code = "model_not_ready"
    exit_code = 3

    @property
    def lasting(self) -> bool:
        """Where it will be ready by itself, `retry_after_s` says when to ask again."""
        return self.retry_after_s is None


class UpstreamError(FitserveError):
    """The engine could not be reached, or broke off."""

    status = 502
    type = "api_error"
    code = "engine_error"


class EngineUnreachable(UpstreamError):
    """No connection to the engine; it has not seen the request."""

    code = "engine_unreachable"


class LoopDetected(FitserveError):
    """Gateways whose endpoints are each other."""

    status = 508
    code = "loop_detected"


class HostError(FitserveError):
    """The host (Docker, or the process table) refused or is not there."""

    status = 503
    code = "host_error"


class ForeignInstance(HostError):
    """Something that is not ours holds the name we need; we never touch it."""

    status = 409
    code = "foreign_instance"


class AgentRefusal(HostError):
    """The agent does not do what it was asked for: it is more than an engine needs."""

    status = 403
    code = "agent_refusal"


class StoreError(FitserveError):
    """The database cannot be opened or written; nothing was changed."""

    status = 507
    code = "store_error"


class SettingsError(FitserveError):
    """The gateway may not start with these settings."""

    code = "bad_settings"
    exit_code = 2
