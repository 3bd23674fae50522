"""Limits of a key: requests per minute, tokens per minute, concurrent requests.

Excess requests get 429. A minute's quota can be used in one go, and refills evenly over the next
minute. Tokens are known only at the end of an answer. Then they are deducted, and a negative
balance delays the next request. If an answer reports no usage (the client left, or streamed without
usage), its tokens are estimated from its bytes, up to a minute's quota.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.errors import RateLimited
from gateway.proxy.access.auth import Key, KeyLimits
from gateway.proxy.api.endpoints import Shape

MINUTE_S = 60.0
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

    def take(self, count: int, now: float) -> None:
        self._level, self._at = self.level(now) - count, now

    def wait_s(self, level: float, now: float) -> float:
        """Seconds until the bucket has this level."""
        return max(0.0, (level - self.level(now)) * MINUTE_S / self.size)


class Account:
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
            self.requests.take(1, now)

    def end(self, tokens: int, now: float) -> None:
        """Count the end of a request."""
        self.count(-1)
        if self.tokens is not None:
            self.tokens.take(tokens, now)

    def _limit_error(self, reason: str, wait_s: float, shape: Shape, now: float) -> RateLimited:
        seconds = max(1, math.ceil(wait_s))
        error = RateLimited(
            f"The key has used {reason}.", hint=f"Try again in {seconds} s.", retry_after_s=seconds
        )
        error.headers = self.headers(shape, now)
        return error

    def headers(self, shape: Shape, now: float) -> Headers:
        """Remaining quota in the headers of OpenAI or Anthropic."""
        lines: list[tuple[bytes, bytes]] = []
        for bucket, unit in ((self.requests, b"requests"), (self.tokens, b"tokens")):
            if bucket is None:
                continue
            remaining = max(0, math.floor(bucket.level(now)))
            full_s = bucket.wait_s(bucket.size, now)
            if shape == "anthropic":
                name, reset = b"anthropic-ratelimit-" + unit + b"-%b", _moment(full_s)
            else:
                name, reset = b"x-ratelimit-%b-" + unit, _duration(full_s)
            lines += [
                (name % b"limit", b"%d" % bucket.size),
                (name % b"remaining", b"%d" % remaining),
                (name % b"reset", reset),
            ]
        return tuple(lines)


@dataclass(frozen=True, slots=True)
class Permit:
    """An admitted request. Each permit needs its `end`."""

    account: Account
    shape: Shape

    def lines(self, now: float) -> bytes:
        """Lines for the head of the answer."""
        return b"".join(b"%b: %b\r\n" % pair for pair in self.account.headers(self.shape, now))

    def end(self, tokens: int, now: float) -> None:
        self.account.end(tokens, now)


class RateLimiter:
    """Accounts of all keys with limits. Only the event loop that serves requests calls these
    methods."""

    def __init__(self) -> None:
        self._accounts: dict[bytes, Account] = {}

    def admit(self, key: Key, shape: Shape, now: float) -> Permit | None:
        """A permit for one request; None: the key has no limits. Raises RateLimited."""
        if key.limit is None:
            return None
        account = self._accounts.get(key.digest)
        if account is None:
            account = self._accounts[key.digest] = self._open_account(key.digest, key.limit, now)
        account.admit(shape, now)
        return Permit(account, shape)

    def _open_account(self, digest: bytes, limit: KeyLimits, now: float) -> Account:  # noqa: ARG002
        return Account(limit, now)

    def keep(self, digests: Iterable[bytes]) -> None:
        """Drop the accounts of removed keys."""
        valid = set(digests)
        self._accounts = {
            digest: account for digest, account in self._accounts.items() if digest in valid
        }


def estimate(asked_bytes: int, sent_bytes: int, *, events: bool, limit: int) -> int:
    """The tokens of a request and its answer, estimated from their bytes; at most `limit`."""
    return min(
        limit, asked_bytes // TEXT_BYTES + sent_bytes // (EVENT_BYTES if events else TEXT_BYTES)
    )


def _duration(seconds: float) -> bytes:
    """A duration in the form of OpenAI's headers: 250ms, 7s, 6m0s."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    whole_seconds = math.ceil(seconds)
    return b"%dm%ds" % divmod(whole_seconds, 60) if whole_seconds >= 60 else b"%ds" % whole_seconds


def _moment(seconds: float) -> bytes:
    """The time in `seconds`, in the form of Anthropic's headers."""
    return (
        datetime.fromtimestamp(math.ceil(time.time() + seconds), UTC)
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .encode()
    )
