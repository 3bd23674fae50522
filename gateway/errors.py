"""The tree of errors that users can meet.

The class gives the HTTP status, the OpenAI error type and a code. The message describes the error
and its cause, the hint the next step. Both reach the user, in the CLI and over HTTP.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

# Request timeout, conflict, too many requests: a retry may succeed.
_RETRY_STATUSES = frozenset({408, 409, 429})
_MAX_REASON_CHARACTERS = 200
# The user and the password of an address (RFC 3986, section 3.2.1), and an `@` in a password.
_CREDENTIALS = re.compile(r"(?<=://)[^\s/?#'\"<>]*@")
# The same without a scheme: a colon stands between them. The digest of an image follows an `@` too.
_TYPED_CREDENTIALS = re.compile(r"[^\s'\"<>/:@]+:[^\s'\"<>/@]+@(?!sha256:)")


def short_reason(error: BaseException) -> str:
    """The reason of a network error without numbers and addresses: `Connection refused`.

    The name of its type where it has no reason.
    """
    # asyncio names each address that it tried.
    if numbers := re.findall(r"\[Errno (\d+)\] Connect call failed", str(error)):
        return ", ".join(dict.fromkeys(os.strerror(int(number)) for number in numbers))
    reason = getattr(error, "strerror", None) or re.sub(r"^\[Errno -?\d+\] ", "", str(error))
    return (
        str(reason).partition("\n")[0][:_MAX_REASON_CHARACTERS].rstrip(". ") or type(error).__name__
    )


def hide_password(text: str) -> str:
    """The text, where each address has neither a user nor a password."""
    return _CREDENTIALS.sub("", text) if "@" in text else text


def restore_passwords(text: str, former_text: str) -> str:
    """The text, where each address without user and password gets those of the former text's
    address of the same host."""
    for credentials in _CREDENTIALS.finditer(former_text):
        host = re.match(r"[^\s/?#'\"<>]*", former_text[credentials.end() :])
        if host is not None and host[0]:
            address = rf"(?<=://)(?={re.escape(host[0])}(?:[\s/?#'\"<>]|$))"
            text = re.sub(address, credentials[0].replace("\\", r"\\"), text)
    return text


def hide_typed_password(text: str) -> str:
    """The text as `hide_password` has it, also of addresses without a scheme, such as images."""
    return _TYPED_CREDENTIALS.sub("", hide_password(text))


class FitserveError(Exception):
    """Base of all expected errors. Any other exception is a bug, and gives a bare 500.

    `exit_code` of a command: 2 where its arguments, a setting or a file that it reads are wrong, 3
    where nothing can run or answer now, 1 where it was refused or failed otherwise.
    """

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
        message = hide_password(message)
        super().__init__(message)
        self.message = message
        self.hint = hide_password(hint)
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow  # the allowed method, for MethodNotAllowed

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    @property
    def is_permanent(self) -> bool:
        """Whether retries of the same request fail until an operator changes something."""
        return 400 <= self.status < 500 and self.status not in _RETRY_STATUSES

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
    """The request is wrong in every state of the gateway."""

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
    def source_error(cls, source: str, files: Sequence[str]) -> Self:
        return cls(
            f"{source} has code of its own that the engine would run: {', '.join(files[:5])}.",
            hint="Add it with policy.allow_remote_code=true if you trust it, pinned to a commit.",
        )


class BadFlag(BadRequest):
    """An engine flag or variable that the engine version does not have, or that is closed."""

    code = "bad_flag"


class Unauthorized(FitserveError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(FitserveError):
    """A valid key without the right to do this."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class Cancelled(FitserveError):
    """An operator cancelled the request.

    Status 403, because clients retry after 408, 409, 429 and 5xx (openai 3.52.0, `_should_retry`).
    """

    status = 403
    type = "permission_error"
    code = "cancelled"


class NotFound(FitserveError):
    """No such model, route or engine."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    """The gateway does not serve the `model` of a request."""

    code = "model_not_found"


class MethodNotAllowed(FitserveError):
    """The path exists, but not for this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


def near_name(name: str, names: Iterable[str]) -> str:
    """The name that was probably meant; "": none is near."""
    return next(iter(difflib.get_close_matches(name[:_MAX_REASON_CHARACTERS], list(names), 1)), "")


def near_name_hint(name: str, names: Iterable[str]) -> str:
    """The words after an unknown name: ` (did you mean NAME?)`, or nothing."""
    suggestion = near_name(name, names)
    return f" (did you mean {suggestion}?)" if suggestion else ""


def no_model_error(name: str, models: Mapping[str, str]) -> NotFound:
    """The error for an unknown name. models: the main name of each model by all its names."""
    suggestion = near_name(name, models)
    hint = f"Did you mean {models[suggestion]}? " if suggestion else ""
    return NotFound(
        f"There is no model {name[:_MAX_REASON_CHARACTERS]}.",
        hint=f"{hint}`fitserve ps` lists the models.",
    )


def no_route_error(method: str, path: str, hint: str) -> NotFound:
    """The error for a path of HTTP without a route."""
    return NotFound(f"The route {method} {path[:200]} does not exist.", hint=hint)


class Conflict(FitserveError):
    """The name is taken, or the state of the object does not allow the operation."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"

    @classmethod
    def name_error(cls, name: str, *, is_leaving: bool, has_failed: bool = False) -> Self:
        """The error for a name that is taken. has_failed: its model cannot be served."""
        if is_leaving:
            hint = "Try again in a few seconds."
            return cls(f"The model {name} is still being removed.", hint=hint)
        if has_failed:
            return cls(
                f"The model {name} exists already, and could not be started.",
                hint=f"`fitserve set {name}` changes it, `fitserve retry {name}` starts it again,"
                f" and after `fitserve rm {name}` the name is free.",
            )
        hint = f"Remove it first (`fitserve rm {name}`), or use another name."
        return cls(f"The model {name} exists already.", hint=hint)


class TooLarge(FitserveError):
    """The body is over the limit."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class QuotaReachedError(FitserveError):
    """The files or batches of a key, or of all keys, are as many as they may be."""

    status = 413
    type = "invalid_request_error"
    code = "quota_reached"


class HeadTooLarge(FitserveError):
    """Target and headers of the request are over the limit."""

    status = 431
    type = "invalid_request_error"
    code = "head_too_large"


class TooSlow(FitserveError):
    """The request did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Busy(FitserveError):
    """The gateway has reached its limit of connections."""

    status = 503
    type = "service_unavailable"
    code = "busy"


class RateLimited(FitserveError):
    """The key is over its limit, or wrong keys came too often. `headers` has the limits."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class QuotaExhausted(FitserveError):
    """The budget of a key or its group is spent.

    Type and code are those of OpenAI. Its clients, and others made like them, retry no answer with
    `x-should-retry: false`. They would ignore a Retry-After of more than a minute, and retry
    immediately.
    """

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"

    @property
    def is_permanent(self) -> bool:
        """Always: a retry helps on another day, or after a decision of the operator."""
        return True


class Overloaded(FitserveError):
    """Every replica of the model is full, and so is the queue."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class NoPlan(FitserveError):
    """No engine can run this model on this hardware; the decision lists the reasons."""

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
    def is_permanent(self) -> bool:
        """Whether the model stays not ready; else `retry_after_s` says when to retry."""
        return self.retry_after_s is None


class UpstreamError(FitserveError):
    """The engine could not be reached, or ended its answer early."""

    status = 502
    type = "api_error"
    code = "engine_error"


class EngineUnreachable(UpstreamError):
    """No connection to the engine, which therefore has not seen the request."""

    code = "engine_unreachable"


class LoopDetected(FitserveError):
    """Gateways are endpoints of each other."""

    status = 508
    code = "loop_detected"


class HostError(FitserveError):
    """The host (Docker, or the process table) refused or is not reachable."""

    status = 503
    code = "host_error"


class ForeignInstance(HostError):
    """A container or process of another owner has the name; the gateway never touches it."""

    status = 409
    code = "foreign_instance"


class AgentAway(HostError):
    """The agent, or a machine of the cluster, does not answer, or stopped answering."""

    code = "agent_away"


class AgentRefusal(HostError):
    """The agent refuses the request, because it asks for more than an engine needs."""

    status = 403
    code = "agent_refusal"


class StoreError(FitserveError):
    """The database cannot be opened or written; nothing was changed."""

    status = 507
    code = "store_error"


class WriteFailedError(FitserveError):
    """A file that a command shall write cannot be written."""

    code = "write_failed"


class SettingsError(FitserveError):
    """The gateway may not start with these settings."""

    code = "bad_settings"
    exit_code = 2


def listen_error(host: str, port: int, problem: str | None) -> SettingsError:
    """The error for an address that another program uses."""
    return SettingsError(
        f"Cannot listen on {host} port {port}: {problem}.",
        hint="Stop the program that uses it, or set FITSERVE_PORT.",
    )


# pydantic's sentences and names of types in the words of people.
_TYPE_WORDS = (
    (re.compile(r"^(?:Input|String|List|Tuple|Dictionary|Set|Value) should "), "must "),
    (re.compile(r"^Field required"), "is missing"),
    (re.compile(r" after validation, not \d+$"), ""),
    (re.compile(r"greater than or equal to "), "at least "),
    (re.compile(r"less than or equal to "), "at most "),
    (re.compile(r"greater than "), "above "),
    (re.compile(r"less than "), "below "),
    (re.compile(r"valid integer(?:, (?:unable|got).*)?"), "whole number"),
    (re.compile(r"valid number(?:, unable.*)?"), "number"),
    (re.compile(r"valid boolean(?:, unable.*)?"), "true or false"),
    (re.compile(r"valid (?:tuple|list)"), "list"),
    (re.compile(r"valid string(?:, unable.*)?"), "text"),
    (re.compile(r"valid dictionary(?: or .*)?"), "mapping"),
)
MUST_BE = "must be "
"""The beginning of a problem with the type of a value."""


def plain_problem(message: str) -> str:
    """A message of pydantic without its own words."""
    message = message.removeprefix("Value error, ")
    for pattern, words in _TYPE_WORDS:
        message = pattern.sub(words, message)
    return message.replace("a true or false", "true or false")
