"""What a key may use: requests per minute, tokens per minute, requests at once. Refused before an
engine is asked, with 429.

A minute's worth can be used at once, and comes back evenly over the minute that follows. Tokens are
known only when an answer ends: they are taken then, what is over the limit is owed, and the next
request waits until it is paid. Where an answer does not tell (the client left, or asked for no
usage in its stream) they are estimated from its bytes, at no more than a minute's worth.
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
# Bytes per token, for an estimate: of text in JSON, and of an event that holds one token.
TEXT_BYTES = 4
EVENT_BYTES = 200

Headers = tuple[tuple[bytes, bytes], ...]


class Bucket:
    """`size` per minute, full at first. Less than nothing is owed."""

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
        """Until there is so much."""
        return max(0.0, (level - self.level(now)) * MINUTE_S / self.size)


class Account:
    """What one key has used."""

    def __init__(self, limit: KeyLimits, now: float) -> None:
        self._under_way = 0
        self.most = limit.in_flight
        self.requests = (
            Bucket(limit.requests_per_minute, now) if limit.requests_per_minute else None
        )
        self.tokens = Bucket(limit.tokens_per_minute, now) if limit.tokens_per_minute else None

    def under_way(self) -> int:
        return self._under_way

    def count(self, change: int) -> None:
        """As many more are under way."""
        self._under_way += change

    def admit(self, shape: Shape, now: float) -> None:
        """Takes a request. Raises RateLimited."""
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            if bucket is not None and bucket.level(now) < 1:
                wait_s = bucket.wait_s(1, now)
                raise self._refusal(
                    f"more than its {bucket.size} {what} per minute", wait_s, shape, now
                )
        if self.most is not None and self.under_way() >= self.most:
            raise self._refusal(
                f"as many requests under way as it may have, {self.most}", 1, shape, now
            )
        self.count(1)
        if self.requests is not None:
            self.requests.take(1, now)

    def end(self, tokens: int, now: float) -> None:
        """Of a request that was taken."""
        self.count(-1)
        if self.tokens is not None:
            self.tokens.take(tokens, now)

    def _refusal(self, why: str, wait_s: float, shape: Shape, now: float) -> RateLimited:
        seconds = max(1, math.ceil(wait_s))
        error = RateLimited(
            f"The key has used {why}.", hint=f"Try again in {seconds} s.", retry_after_s=seconds
        )
        error.headers = self.headers(shape, now)
        return error

    def headers(self, shape: Shape, now: float) -> Headers:
        """How much is left, in the headers of OpenAI or Anthropic."""
        lines: list[tuple[bytes, bytes]] = []
        for bucket, what in ((self.requests, b"requests"), (self.tokens, b"tokens")):
            if bucket is None:
                continue
            left, full_s = max(0, math.floor(bucket.level(now))), bucket.wait_s(bucket.size, now)
            if shape == "anthropic":
                name, reset = b"anthropic-ratelimit-" + what + b"-%b", _moment(full_s)
            else:
                name, reset = b"x-ratelimit-%b-" + what, _duration(full_s)
            lines += [
                (name % b"limit", b"%d" % bucket.size),
                (name % b"remaining", b"%d" % left),
                (name % b"reset", reset),
            ]
        return tuple(lines)


@dataclass(frozen=True, slots=True)
class Permit:
    """A request that was admitted. Each has its `end`."""

    account: Account
    shape: Shape

    def lines(self, now: float) -> bytes:
        """For the head of the answer."""
        return b"".join(b"%b: %b\r\n" % pair for pair in self.account.headers(self.shape, now))

    def end(self, tokens: int, now: float) -> None:
        self.account.end(tokens, now)


class RateLimiter:
    """The accounts of all keys with limits. Only the event loop that serves requests calls these
    methods."""

    def __init__(self) -> None:
        self._accounts: dict[bytes, Account] = {}

    def admit(self, key: Key, shape: Shape, now: float) -> Permit | None:
        """None: this key has no limits. Raises RateLimited."""
        if key.limit is None:
            return None
        account = self._accounts.get(key.digest)
        if account is None:
            account = self._accounts[key.digest] = self._open(key.digest, key.limit, now)
        account.admit(shape, now)
        return Permit(account, shape)

    def _open(self, digest: bytes, limit: KeyLimits, now: float) -> Account:  # noqa: ARG002 - where the memory is shared
        return Account(limit, now)

    def keep(self, digests: Iterable[bytes]) -> None:
        """Forgets the accounts of keys that are gone."""
        kept = set(digests)
        self._accounts = {
            digest: account for digest, account in self._accounts.items() if digest in kept
        }


def estimate(asked_bytes: int, sent_bytes: int, *, events: bool, most: int) -> int:
    """Tokens of a request and its answer, from their bytes; not more than `most`."""
    return min(
        most, asked_bytes // TEXT_BYTES + sent_bytes // (EVENT_BYTES if events else TEXT_BYTES)
    )


def _duration(seconds: float) -> bytes:
    """As in OpenAI's headers: 250ms, 7s, 6m0s."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    whole = math.ceil(seconds)
    return b"%dm%ds" % divmod(whole, 60) if whole >= 60 else b"%ds" % whole


def _moment(seconds: float) -> bytes:
    """In so many seconds, as in Anthropic's headers."""
    return (
        datetime.fromtimestamp(math.ceil(time.time() + seconds), UTC)
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .encode()
    )
