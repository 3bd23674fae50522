"""Who may call: bearer keys, and without any key only this machine's own programs.

no key at all           everything is open; the server listens on loopback only, and web pages are kept out
keys of the settings    FITSERVE_ADMIN_KEY, good for everything; FITSERVE_API_KEY, good for inference only
keys that were made     with the scopes and limits of their grants (`gateway.domain.grant`); in the store as digests
no key with a scope     what needs that scope is closed
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from gateway.errors import BadRequest, Forbidden, Unauthorized
from gateway.keys import SCOPES, Scope, digest_of
from gateway.proxy.access.failed_logins import FailedLogins
from gateway.proxy.access.origins import ANY, Origins

if TYPE_CHECKING:
    # Workers hold keys too, and do without the values of the planner: 15 MiB each.
    from gateway.domain.grant import Grant

# Names and literals that always mean this machine, so that no DNS answer can point them elsewhere.
_LOOPBACK = rb"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]{1,5})?"
_LOCAL_HOST = re.compile(_LOOPBACK, re.IGNORECASE)
_LOCAL_ORIGIN = re.compile(rb"https?://" + _LOOPBACK, re.IGNORECASE)
# A key of the settings with fewer characters may have been made up by a person.
_LONG = 32
_NOBODY = bytes(32)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may use. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A caller. `models`: the models that the caller may ask, None for all; `limit`: None for no
    limits."""

    name: str
    digest: bytes = field(repr=False)
    scopes: frozenset[Scope]
    models: frozenset[str] | None = None
    limit: KeyLimits | None = None
    guessable: bool = False

    def sees(self, model: str) -> bool:
        return self.models is None or model in self.models


# Whoever calls a gateway without keys.
ANYONE = Key("", _NOBODY, SCOPES)


def key_of(grant: Grant, digest: bytes) -> Key:
    scopes = SCOPES if "admin" in grant.scopes else frozenset(grant.scopes)
    limit = KeyLimits(grant.requests_per_minute, grant.tokens_per_minute, grant.max_in_flight)
    models = None if grant.models is None else frozenset(grant.models)
    return Key(grant.name, digest, scopes, models, None if limit == KeyLimits() else limit)


@dataclass(frozen=True, slots=True)
class KeyTable:
    """All keys in force, by their SHA-256 digests only: a memory dump or a traceback does not give
    them away.

    `closed`: the stored keys cannot be read, so only the keys of the settings are good.
    """

    keys: Mapping[bytes, Key]
    closed: bool = False

    @property
    def scopes(self) -> frozenset[Scope]:
        """The scopes that at least one key has."""
        return frozenset(scope for key in self.keys.values() for scope in key.scopes)


class Keys:
    """The keys of the settings, and the keys that were made here. The table is swapped whole, so
    that keys can change while requests come."""

    def __init__(
        self,
        admin: str | None,
        api: str | None,
        made: Iterable[Key] = (),
        failed_logins: FailedLogins | None = None,
        origins: Origins | None = None,
    ) -> None:
        fixed: tuple[tuple[str, str | None, frozenset[Scope]], ...]
        fixed = (("api", api, frozenset({"inference"})), ("admin", admin, SCOPES))
        self._fixed = tuple(
            Key(name, digest_of(key), scopes, guessable=len(key) < _LONG)
            for name, key, scopes in fixed
            if key is not None
        )
        self._failed_logins = failed_logins or FailedLogins()
        self._origins = origins or Origins()
        self.swap(made)

    def swap(self, made: Iterable[Key], *, closed: bool = False) -> None:
        """From now on these keys are good, and the keys of the settings."""
        self.table = KeyTable(
            MappingProxyType({key.digest: key for key in (*made, *self._fixed)}), closed
        )
        self._open = not self.table.keys and not closed
        self._scopes = self.table.scopes

    @property
    def fixed_names(self) -> frozenset[str]:
        """Of the keys of the settings."""
        return frozenset(key.name for key in self._fixed)

    @property
    def fixed_scopes(self) -> frozenset[Scope]:
        return frozenset(scope for key in self._fixed for scope in key.scopes)

    @property
    def open(self) -> bool:
        return self._open

    def admit(self, headers: Iterable[tuple[bytes, bytes]], need: Scope, address: str = "") -> Key:
        """The caller with these (lower-case) ASGI headers, who must have the scope `need`. Raises
        BadRequest, and the errors of `who`."""
        found: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in (b"authorization", b"host", b"origin"):
                if name in found:
                    raise BadRequest(
                        f"The request has two {name.decode()} headers.", hint="Send one."
                    )
                found[name] = value
        return self.who(found, need, address)

    def who(self, found: Mapping[bytes, bytes], need: Scope, address: str) -> Key:
        """As `admit`, where no header comes twice. Raises Forbidden and as `check`."""
        if self._open:
            origin = found.get(b"origin")
            check_local(
                found.get(b"host"),
                None if self._welcome(origin, need) else origin,
                own=need != "inference",
            )
            return ANYONE
        return self.check(found.get(b"authorization"), need, address)

    def _welcome(self, origin: bytes | None, need: Scope) -> bool:
        """Whether pages of that origin may call without a key. That all may (`*`) is no leave to
        start programs here."""
        return self._origins.names(origin) or (need == "inference" and ANY in self._origins.named)

    def check(self, authorization: bytes | None, need: Scope, address: str = "") -> Key:
        """Raises Unauthorized without a good key, Forbidden when the key is good but not for
        `need`, RateLimited (`FailedLogins`)."""
        if self._open:
            return ANYONE
        if need not in self._scopes:
            what = "inference API is" if need == "inference" else "admin API is"
            name = "API" if need == "inference" else "admin"
            raise Forbidden(
                f"The {what} closed: no {name} key is configured.",
                hint="Set FITSERVE_ADMIN_KEY and restart.",
            )
        if authorization is None:
            raise Unauthorized(
                "This needs a key.", hint="Send the header `Authorization: Bearer KEY`."
            )
        scheme, _, token = authorization.partition(b" ")
        token = token.strip()
        if scheme.lower() != b"bearer" or not token:
            raise Unauthorized(
                "The Authorization header is not a bearer key.",
                hint="Send `Authorization: Bearer KEY`.",
            )
        # The time of the look-up depends on the digest of the token that was sent, not on the
        # token. So the time leads nobody nearer to a key.
        digest = digest_of(token)
        key = self.table.keys.get(digest)
        if not hmac.compare_digest(digest, _NOBODY if key is None else key.digest) or key is None:
            self._failed_logins.wrong(address)
            raise Unauthorized(
                "The key is not one of this gateway.",
                hint="Check it for missing or extra characters.",
            )
        if key.guessable:
            self._failed_logins.right(address, digest)
        if need not in key.scopes:
            raise Forbidden(
                f"This key is for {' and '.join(sorted(key.scopes))} only.",
                hint=f"This needs a key for {need}.",
            )
        return key


def check_local(host: bytes | None, origin: bytes | None, *, own: bool = False) -> None:
    """Keeps web pages out of a gateway without keys: Host shows DNS rebinding, Origin a foreign
    page. own: only pages of this very port may
    call, not those of other programs of this machine. Raises Forbidden."""
    if host is None or not _LOCAL_HOST.fullmatch(host):
        raise Forbidden(
            "Without a key this gateway answers only to localhost, and the Host header names"
            " something else.",
            hint="Use http://127.0.0.1 or http://localhost, or set FITSERVE_ADMIN_KEY.",
        )
    if origin is None:
        return
    if not _LOCAL_ORIGIN.fullmatch(origin) or (
        own and origin.partition(b"://")[2].lower() != host.lower()
    ):
        raise Forbidden(
            "Without a key this gateway takes no requests from web pages of another origin.",
            hint=(
                "Set FITSERVE_ADMIN_KEY and send it, name the origin in FITSERVE_ORIGINS, or call"
                " from this machine."
            ),
        )
