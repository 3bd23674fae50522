"""Web pages of other origins: which may call (`FITSERVE_ORIGINS`), and what their browsers are
told. Never with credentials: a page sends its key itself."""

from __future__ import annotations

from dataclasses import dataclass

# What a page may read of an answer beside its body.
EXPOSED = (
    "x-request-id",
    "x-gateway-source",
    "retry-after",
    "x-should-retry",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
    *(
        f"anthropic-ratelimit-{of}-{what}"
        for of in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    ),
)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
ANY = "*"


@dataclass(frozen=True, slots=True)
class Origins:
    """`named`: as browsers send them ("https://app.example"), or "*" for all."""

    named: frozenset[str] = frozenset()

    def names(self, origin: bytes | None) -> bool:
        """Whether exactly this origin is named; all of them together are not."""
        return origin is not None and origin.decode("latin-1") in self.named - {ANY}

    def headers(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """Of an answer to a page of that origin."""
        if origin is None or not (ANY in self.named or self.names(origin)):
            return []
        exposed = (b"access-control-expose-headers", ", ".join(EXPOSED).encode())
        if ANY in self.named:
            return [(b"access-control-allow-origin", b"*"), exposed]
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin"), exposed]

    def lines(self, origin: bytes | None) -> bytes:
        """The same as lines of a head."""
        return b"".join(b"%b: %b\r\n" % pair for pair in self.headers(origin))
