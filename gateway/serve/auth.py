"""Who may call: bearer keys, and without any key only this machine's own programs.

no key configured       everything is open; the server listens on loopback only, and web pages are kept out
admin key               good for everything
API key                 good for inference only; without an admin key beside it the admin API is closed
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Literal

from gateway.errors import BadRequest, Forbidden, Unauthorized

Need = Literal["inference", "admin"]

# Names and literals that always mean this machine, so that no DNS answer can point them elsewhere.
_LOOPBACK = rb"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]{1,5})?"
_LOCAL_HOST = re.compile(_LOOPBACK, re.IGNORECASE)
_LOCAL_ORIGIN = re.compile(rb"https?://" + _LOOPBACK, re.IGNORECASE)


class Keys:
    """The configured keys, as SHA-256 digests only: a memory dump or a traceback does not give them away."""

    def __init__(self, admin: str | None, api: str | None) -> None:
        self._admin = _digest(admin)
        self._api = _digest(api)

    @property
    def open(self) -> bool:
        return self._admin is None and self._api is None

    def admit(self, headers: Iterable[tuple[bytes, bytes]], need: Need) -> None:
        """Whether a request with these (lower-case) ASGI headers may do what needs `need`. Raises BadRequest and as `check`."""
        found: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in (b"authorization", b"host", b"origin"):
                if name in found:
                    raise BadRequest(f"The request has two {name.decode()} headers.", hint="Send one.")
                found[name] = value
        if self.open:
            check_local(found.get(b"host"), found.get(b"origin"))
        else:
            self.check(found.get(b"authorization"), need)

    def check(self, authorization: bytes | None, need: Need) -> None:
        """Raises Unauthorized without a good key, Forbidden when the key is good but not for `need`."""
        if self.open:
            return
        if need == "admin" and self._admin is None:
            raise Forbidden("The admin API is closed: no admin key is configured.", hint="Set FITSERVE_ADMIN_KEY and restart.")
        if authorization is None:
            raise Unauthorized("This needs a key.", hint="Send the header `Authorization: Bearer KEY`.")
        scheme, _, token = authorization.partition(b" ")
        token = token.strip()
        if scheme.lower() != b"bearer" or not token:
            raise Unauthorized("The Authorization header is not a bearer key.", hint="Send `Authorization: Bearer KEY`.")
        digest = hashlib.sha256(token).digest()
        if _same(digest, self._admin):
            return
        if not _same(digest, self._api):
            raise Unauthorized("The key is not one of this gateway.", hint="Check it for missing or extra characters.")
        if need == "admin":
            raise Forbidden("This key is for inference only.", hint="The admin API needs the admin key.")


def check_local(host: bytes | None, origin: bytes | None) -> None:
    """Keeps web pages out of a gateway without keys: Host shows DNS rebinding, Origin a foreign page. Raises Forbidden."""
    if host is None or not _LOCAL_HOST.fullmatch(host):
        raise Forbidden(
            "Without a key this gateway answers only to localhost, and the Host header names something else.",
            hint="Use http://127.0.0.1 or http://localhost, or set FITSERVE_ADMIN_KEY.",
        )
    if origin is not None and not _LOCAL_ORIGIN.fullmatch(origin):
        raise Forbidden(
            "Without a key this gateway takes no requests from web pages of another origin.",
            hint="Set FITSERVE_ADMIN_KEY and send it, or call from this machine.",
        )


def _digest(key: str | None) -> bytes | None:
    # surrogateescape: a key from the environment may hold bytes that are not UTF-8, and clients send just those bytes.
    return None if key is None else hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _same(digest: bytes, expected: bytes | None) -> bool:
    return expected is not None and hmac.compare_digest(digest, expected)
