"""Web pages of other origins (`FITSERVE_ORIGINS`): permission to call, and CORS headers.

Credentials are never allowed: a page sends its key itself.
"""

from __future__ import annotations

from dataclasses import dataclass

# Headers of an answer that a page may read.
EXPOSED_HEADERS = (
    "x-request-id",
    "x-gateway-source",
    "retry-after",
    "x-should-retry",
    "x-fitserve-budget-warning",
    *(
        f"x-ratelimit-{value}-{unit}"
        for value in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
    *(
        f"anthropic-ratelimit-{unit}-{value}"
        for unit in ("requests", "tokens")
        for value in ("limit", "remaining", "reset")
    ),
)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
EVERY_ORIGIN = "*"


@dataclass(frozen=True, slots=True)
class Origins:
    """The other origins whose web pages may call.

    `named_origins`: origins in the form that browsers send ("https://app.example"), or "*" for all.
    """

    named_origins: frozenset[str] = frozenset()

    def names(self, origin: bytes | None) -> bool:
        """Whether exactly this origin is named; "*" does not count."""
        return origin is not None and origin.decode("latin-1") in self.named_origins - {
            EVERY_ORIGIN
        }

    def headers(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """CORS headers of an answer to a page of that origin."""
        if origin is None or not (EVERY_ORIGIN in self.named_origins or self.names(origin)):
            return []
        exposed_headers = (b"access-control-expose-headers", ", ".join(EXPOSED_HEADERS).encode())
        if EVERY_ORIGIN in self.named_origins:
            return [(b"access-control-allow-origin", b"*"), exposed_headers]
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin"), exposed_headers]

    def lines(self, origin: bytes | None) -> bytes:
        """The CORS headers as lines of a head."""
        return b"".join(b"%b: %b\r\n" % pair for pair in self.headers(origin))
