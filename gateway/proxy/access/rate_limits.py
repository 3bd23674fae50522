"""Limits of a key: requests per minute, tokens per minute, concurrent requests.

Excess requests get 429. A minute's quota can be used in one go, and refills evenly over the next
minute. Tokens are known only at the end of an answer. Then they are deducted, and a negative
balance delays the next request. If an answer reports no usage (the client left, or streamed without
usage), its tokens are estimated from its bytes, up to a minute's quota.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.errors import QuotaExhausted, RateLimited
from gateway.proxy.access.auth import Key, KeyLimits
from gateway.proxy.access.budgets import WARNING_HEADER, BudgetAdmission, Charge, Quota, TokenCount
from gateway.proxy.access.ledger import NO_AMOUNTS
from gateway.proxy.api.endpoints import Shape

MINUTE_S = 60.0
_HOUR_S = 3600
# No request has more tokens, whatever the bytes of its media.
_MAX_TOKENS = 2**20
# Bytes per token for an estimate: of text in JSON, and of an event with one token.
TEXT_BYTES = 4
EVENT_BYTES = 200

Headers = tuple[tuple[bytes, bytes], ...]


class Bucket:
    """Token bucket of `size` per minute, full at first. A negative level is a debt."""

    __slots__ = ("_at", "_level", "size")

    def __init__(self, size: int, now: float) -> None:
        self.size = size
        self._level = float(size)
        self._at = now

    def level(self, now: float) -> float:
        return min(self.size, self._level + (now - self._at) * self.size / MINUTE_S)

    def draw(self, count: int, now: float) -> None:
        self._level = self.level(now) - count
        self._at = now

    def wait_s(self, level: float, now: float) -> float:
        """Seconds until the bucket has this level."""
        return max(0.0, (level - self.level(now)) * MINUTE_S / self.size)


class KeyUsage:
    """Usage of one key."""

    def __init__(self, limit: KeyLimits, now: float) -> None:
        self._active_requests = 0
        self.limit = limit.in_flight
        self.requests = (
            Bucket(limit.requests_per_minute, now) if limit.requests_per_minute else None
        )
        self.tokens = Bucket(limit.tokens_per_minute, now) if limit.tokens_per_minute else None

    def active_requests(self) -> int:
        return self._active_requests

    def count(self, change: int) -> None:
        """Adds to the number of current requests."""
        self._active_requests += change

    def admit(self, shape: Shape, now: float) -> None:
        """Count a new request. Raises RateLimited."""
        for bucket, unit in ((self.requests, "requests"), (self.tokens, "tokens")):
            if bucket is not None and bucket.level(now) < 1:
                wait_s = bucket.wait_s(1, now)
                raise self._limit_error(
                    f"more than its {bucket.size} {unit} per minute", wait_s, shape, now
                )
        if self.limit is not None and self.active_requests() >= self.limit:
            raise self._limit_error(f"its {self.limit} concurrent requests", 1, shape, now)
        self.count(1)
        if self.requests is not None:
            self.requests.draw(1, now)

    def finish(self, tokens: int, now: float) -> None:
        """Count the end of a request."""
        self.count(-1)
        if self.tokens is not None:
            self.tokens.draw(tokens, now)

    def _limit_error(self, reason: str, wait_s: float, shape: Shape, now: float) -> RateLimited:
        seconds = max(1, math.ceil(wait_s))
        error = RateLimited(
            f"The key has used {reason}.", hint=f"Try again in {seconds} s.", retry_after_s=seconds
        )
        error.headers = tight_headers(self.quotas(now), shape)
        return error

    def quotas(self, now: float) -> Iterator[Quota]:
        """The limits of a minute."""
        for bucket, unit in ((self.requests, "requests"), (self.tokens, "tokens")):
            if bucket is not None:
                remaining = max(0, math.floor(bucket.level(now)))
                yield Quota(unit, bucket.size, remaining, bucket.wait_s(bucket.size, now))


def tight_headers(quotas: Iterable[Quota], shape: Shape) -> Headers:
    """The limit of each unit with the least remaining, of equal ones the last to be full, in the
    headers that the clients of OpenAI or Anthropic read."""
    tight_quotas: dict[str, Quota] = {}
    for quota in quotas:
        tight_quota = tight_quotas.get(quota.unit)
        if tight_quota is None or (quota.remaining, -quota.full_s) < (
            tight_quota.remaining,
            -tight_quota.full_s,
        ):
            tight_quotas[quota.unit] = quota
    return tuple(
        line
        for quota in tight_quotas.values()
        for line in _quota_headers(
            shape,
            quota.unit.encode(),
            b"%d" % quota.size,
            b"%d" % quota.remaining,
            quota.full_s,
        )
    )


def _quota_headers(
    shape: Shape, unit: bytes, size: bytes, remaining: bytes, full_s: float
) -> Iterator[tuple[bytes, bytes]]:
    """The headers of one limit. full_s: seconds until all of it is there."""
    if shape == "anthropic":
        name = b"anthropic-ratelimit-" + unit + b"-%b"
        reset = _moment(full_s)
    else:
        name = b"x-ratelimit-%b-" + unit
        reset = _duration(full_s)
    yield name % b"limit", size
    yield name % b"remaining", remaining
    yield name % b"reset", reset


def budget_headers(charge: Charge, shape: Shape) -> Headers:
    """The remaining budgets of a request, and which of them are nearly spent."""
    lines = [
        line
        for unit, size, remaining, full_s in charge.headers()
        for line in _quota_headers(shape, unit, size, remaining, full_s)
    ]
    if warning := charge.warning():
        lines.append((WARNING_HEADER, warning.encode()))
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class Permit:
    """An admitted request. Each permit needs its `finish`.

    charge: the charge to budgets; None for none.
    context_tokens: the most tokens of a request.
    """

    account: KeyUsage
    shape: Shape
    charge: Charge | None = None
    context_tokens: int = _MAX_TOKENS

    def headers(self, now: float) -> Headers:
        """The remaining limits, for the head of the answer."""
        if self.charge is None:
            return tight_headers(self.account.quotas(now), self.shape)
        quotas = (*self.account.quotas(now), *self.charge.quotas())
        return tight_headers(quotas, self.shape) + budget_headers(self.charge, self.shape)

    def lines(self, now: float) -> bytes:
        """Lines for the head of the answer."""
        return b"".join(b"%b: %b\r\n" % pair for pair in self.headers(now))

    @property
    def estimate_limit(self) -> int:
        """The most tokens of an estimate; 0: no limit counts tokens."""
        if self.account.tokens is not None:
            return min(self.account.tokens.size, self.context_tokens)
        return self.context_tokens if self.charge is not None else 0

    def finish(self, count: TokenCount, now: float, *, has_reached_engine: bool = True) -> None:
        """Count the end of the request. Budgets take nothing for one that no engine got."""
        self.account.finish(count.total, now)
        if self.charge is not None:
            self.charge.settle(count, has_reached_engine=has_reached_engine)


class RateLimiter:
    """Accounts of all keys with limits. Only the event loop that serves requests calls these
    methods."""

    def __init__(self, budget_admission: BudgetAdmission | None = None) -> None:
        """budget_admission: None where no key has a budget."""
        self._accounts: dict[bytes, KeyUsage] = {}
        self.budget_admission = budget_admission

    def admit(
        self,
        key: Key,
        shape: Shape,
        now: float,
        model: str = "",
        asked_bytes: int = 0,
        context_tokens: int | None = None,
    ) -> Permit | None:
        """A permit for one request; None: the key has no limits. Raises RateLimited, and the errors
        of `BudgetAdmission.admit`.

        model: the model to ask; "": none, so that the request counts for no budget.
        asked_bytes: the bytes of its body, where that is text.
        context_tokens: the context of the model; None: not known.
        """
        if key.limit is None:
            return None
        digest = key.account
        account = self._accounts.get(digest)
        if account is None:
            account = self._accounts[digest] = self._open_account(digest, key.limit, now)
        account.admit(shape, now)
        if not key.limit.budgets or not model or self.budget_admission is None:
            return Permit(account, shape)
        # Media count as text here, and would be more tokens than any request has.
        context_tokens = context_tokens or _MAX_TOKENS
        prompt_tokens = min(asked_bytes // TEXT_BYTES, context_tokens)
        try:
            charge = self.budget_admission.admit(key.limit.budgets, model, prompt_tokens)
        except BaseException as error:
            account.finish(0, now)
            if isinstance(error, QuotaExhausted):
                charge = Charge(self.budget_admission, key.limit.budgets, model, NO_AMOUNTS)
                quotas = (*account.quotas(now), *charge.quotas())
                error.headers = tight_headers(quotas, shape) + budget_headers(charge, shape)
            raise
        return Permit(account, shape, charge, context_tokens)

    def _open_account(self, digest: bytes, limit: KeyLimits, now: float) -> KeyUsage:  # noqa: ARG002
        return KeyUsage(limit, now)

    def retain(self, digests: Iterable[bytes]) -> None:
        """Drop the accounts of removed keys."""
        valid = set(digests)
        self._accounts = {
            digest: account for digest, account in self._accounts.items() if digest in valid
        }


def estimate(asked_bytes: int, sent_bytes: int, *, is_stream: bool, limit: int) -> int:
    """The tokens of a request and its answer, estimated from their bytes; at most `limit`."""
    tokens = asked_bytes // TEXT_BYTES + sent_bytes // (EVENT_BYTES if is_stream else TEXT_BYTES)
    return min(limit, tokens)


def _duration(seconds: float) -> bytes:
    """A duration in the form of OpenAI's headers: 250ms, 7s, 6m0s, 23h0m1s."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    whole_seconds = math.ceil(seconds)
    if whole_seconds >= _HOUR_S:
        return b"%dh%dm%ds" % (whole_seconds // _HOUR_S, *divmod(whole_seconds % _HOUR_S, 60))
    return b"%dm%ds" % divmod(whole_seconds, 60) if whole_seconds >= 60 else b"%ds" % whole_seconds


def _moment(seconds: float) -> bytes:
    """The time in `seconds`, in the form of Anthropic's headers."""
    return (
        datetime.fromtimestamp(math.ceil(time.time() + seconds), UTC)
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .encode()
    )
