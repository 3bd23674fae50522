"""Authentication of callers by bearer keys; without any key, local callers only.

no key at all           all is open on loopback, except to web pages
keys of the settings    FITSERVE_ADMIN_KEY for everything; FITSERVE_API_KEY for inference only
created keys            scopes and limits of grants (`gateway.domain.grant`); stored as digests
no key with a scope     requests that need that scope are refused
"""

from __future__ import annotations

import hmac
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from datetime import time as time_of_day
from types import MappingProxyType
from typing import TYPE_CHECKING

from gateway.errors import BadRequest, Forbidden, Unauthorized
from gateway.keys import PERSON_PREFIX, SCOPES, Scope, hash_key, new_key, priority_of
from gateway.proxy.access.budgets import KeyBudget
from gateway.proxy.access.failed_logins import FailedLogins
from gateway.proxy.access.origins import EVERY_ORIGIN, Origins
from gateway.secret import Secret

if TYPE_CHECKING:
    # Workers have keys too, and do without the values of the planner, which saves 15 MiB each.
    from gateway.domain.grant import Grant

# Names and addresses that always mean this machine, so that no DNS answer can change them.
_LOOPBACK = rb"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]{1,5})?"
_LOCAL_HOST = re.compile(_LOOPBACK, re.IGNORECASE)
_LOCAL_ORIGIN = re.compile(rb"https?://" + _LOOPBACK, re.IGNORECASE)
# A shorter key of the settings is probably invented by a person.
_LONG_KEY_CHARACTERS = 32
_NO_DIGEST = bytes(32)
_DAY_S = 86_400
# Keys of people's pages, in all and of each person; each has an hour.
_MAX_SESSIONS = 4096
_MAX_PERSON_SESSIONS = 32
_ACCESS_HEADERS = frozenset({b"authorization", b"host", b"origin", b"sec-fetch-site"})
# Values of the header Sec-Fetch-Site: a request by a program, by the address bar, or by our own
# page. A browser sends it even where it sends no Origin, as for images and links.
_OWN_SITES = frozenset({None, b"none", b"same-origin"})


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key. None: no limit. budgets: of the key and its group."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    in_flight: int | None = None
    budgets: tuple[KeyBudget, ...] = ()


def _budget_limits(budgets: tuple[KeyBudget, ...]) -> KeyLimits | None:
    return KeyLimits(budgets=budgets) if budgets else None


@dataclass(frozen=True, slots=True)
class Key:
    """A caller.

    models: the models that the caller may use, None for all.
    limit: None for no limits.
    priority: the priority of its requests; a smaller number goes first.
    ends_at: Unix time of its end.
    principal: digest of the key in whose name this one is used; empty: none.
    is_recorded: transcripts of its requests are kept.
    """

    name: str
    digest: bytes = field(repr=False)
    scopes: frozenset[Scope]
    models: frozenset[str] | None = None
    limit: KeyLimits | None = None
    is_guessable: bool = False
    priority: int = 0
    ends_at: float | None = None
    principal: bytes = field(default=b"", repr=False)
    is_recorded: bool = False

    @property
    def account(self) -> bytes:
        """The digest of the key to which requests are counted."""
        return self.principal or self.digest

    @property
    def is_of_person(self) -> bool:
        return self.name.startswith(PERSON_PREFIX)

    def has_ended(self) -> bool:
        return self.ends_at is not None and time.time() >= self.ends_at

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


# The caller of a gateway without keys.
ANONYMOUS_KEY = Key("", _NO_DIGEST, SCOPES)


def build_key(grant: Grant, digest: bytes, budgets: tuple[KeyBudget, ...] = ()) -> Key:
    """The caller with a grant. budgets: of the grant and its group."""
    scopes = SCOPES if "admin" in grant.scopes else frozenset(grant.scopes)
    limit = KeyLimits(
        grant.requests_per_minute, grant.tokens_per_minute, grant.max_in_flight, budgets
    )
    models = None if grant.models is None else frozenset(grant.models)
    return Key(
        grant.name,
        digest,
        scopes,
        models,
        None if limit == KeyLimits() else limit,
        priority=priority_of(grant.priority_class),
        ends_at=None if grant.expires is None else _day_end(grant.expires),
        is_recorded=grant.is_recorded,
    )


def _day_end(day: date) -> float:
    """Unix time of the end of a day of UTC."""
    return datetime.combine(day, time_of_day(), UTC).timestamp() + _DAY_S


@dataclass(frozen=True, slots=True)
class KeyTable:
    """All valid keys, by their SHA-256 digests only, so a memory dump or a traceback does not
    contain them.

    `is_closed`: the stored keys cannot be read, so only the keys of the settings are valid.
    """

    keys: Mapping[bytes, Key]
    is_closed: bool = False

    @property
    def scopes(self) -> frozenset[Scope]:
        """The scopes that at least one key has."""
        return frozenset(scope for key in self.keys.values() for scope in key.scopes)


class Keys:
    """The keys of the settings and the created keys. The table is replaced as a whole, so keys can
    change while requests arrive."""

    def __init__(
        self,
        admin: Secret | None,
        api: Secret | None,
        created_keys: Iterable[Key] = (),
        failed_logins: FailedLogins | None = None,
        origins: Origins | None = None,
        *,
        person_scopes: frozenset[Scope] | None = None,
    ) -> None:
        """person_scopes: the scopes of people without a key, so that nothing is open to others;
        None: there are no people."""
        fixed_keys: tuple[tuple[str, Secret | None, frozenset[Scope]], ...]
        fixed_keys = (("api", api, frozenset({"inference"})), ("admin", admin, SCOPES))
        self._fixed_keys = tuple(
            Key(name, hash_key(key), scopes, is_guessable=len(key.reveal()) < _LONG_KEY_CHARACTERS)
            for name, key, scopes in fixed_keys
            if key is not None
        )
        self._failed_logins = failed_logins or FailedLogins()
        self._origins = origins or Origins()
        self._person_scopes = person_scopes
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Key] = {}
        """The keys of people's pages, by their digests."""
        self._principals: dict[bytes, bytes] = {}
        """The digests of keys by those of the tokens that stand for them."""
        self.swap(created_keys)

    def swap(self, created_keys: Iterable[Key], *, is_closed: bool = False) -> None:
        """Make `created_keys` and the keys of the settings the valid keys."""
        with self._lock:
            self._apply((*created_keys, *self._fixed_keys), is_closed=is_closed)

    def issue_token(self, key: Key) -> Secret:
        """A token that asks models as a key may, within its limits at the time of each request. It
        ends with that key for good, and is known to this process alone."""
        token = new_key()
        with self._lock:
            self._principals[hash_key(token)] = key.account
            present_keys = [key for key in self.table.keys.values() if not key.principal]
            self._apply(present_keys, is_closed=self.table.is_closed)
        return token

    def open_session(
        self,
        name: str,
        scopes: frozenset[Scope],
        ends_at: float,
        budgets: tuple[KeyBudget, ...] = (),
    ) -> Secret:
        """A key of a person's page. The oldest of the person, and of all, are dropped beyond a
        number, and none is stored."""
        token = new_key()
        limit = _budget_limits(budgets)
        key = Key(name, hash_key(token), scopes, limit=limit, ends_at=ends_at)
        with self._lock:
            sessions = [*self._sessions.values(), key]
            person_keys = [session for session in sessions if session.name == name]
            dropped_keys = person_keys[:-_MAX_PERSON_SESSIONS]
            remaining_keys = [
                session
                for session in sessions
                if not session.has_ended() and session not in dropped_keys
            ]
            self._replace_sessions(remaining_keys[-_MAX_SESSIONS:])
        return token

    @property
    def sessions(self) -> tuple[Key, ...]:
        """The keys of people's pages."""
        return tuple(self._sessions.values())

    def replace_budgets(self, budgets: Mapping[str, tuple[KeyBudget, ...]]) -> bool:
        """Give the page keys of people these budgets, by the name in lists. Returns whether one
        changed."""
        with self._lock:
            sessions = [
                replace(key, limit=_budget_limits(budgets[key.name]))
                if key.name in budgets and _budget_limits(budgets[key.name]) != key.limit
                else key
                for key in self._sessions.values()
            ]
            is_changed = sessions != list(self._sessions.values())
            if is_changed:
                self._replace_sessions(sessions)
        return is_changed

    def close_sessions(self, name: str) -> None:
        """End all page keys of a person."""
        with self._lock:
            self._replace_sessions(key for key in self._sessions.values() if key.name != name)

    def _replace_sessions(self, sessions: Iterable[Key]) -> None:
        """Make these the keys of people's pages, next to all other keys."""
        former_sessions = self._sessions
        self._sessions = {key.digest: key for key in sessions}
        other_keys = [
            key
            for key in self.table.keys.values()
            if not key.principal and key.digest not in former_sessions
        ]
        self._apply(other_keys, is_closed=self.table.is_closed)

    def count_wrong_key(self, address: str) -> None:
        """Count a wrong token. Raises RateLimited after too many."""
        self._failed_logins.count_wrong_key(address)

    def _apply(self, keys: Iterable[Key], *, is_closed: bool) -> None:
        """Make these keys the valid keys, and the tokens of those that are among them."""
        keys_by_digest = {key.digest: key for key in keys} | self._sessions
        if not is_closed:  # otherwise keys are absent that come back
            self._principals = {
                digest: principal
                for digest, principal in self._principals.items()
                if principal in keys_by_digest
            }
        tokens = {
            digest: replace(
                key,
                digest=digest,
                principal=principal,
                scopes=key.scopes & {"inference"},
                is_guessable=False,
            )
            for digest, principal in self._principals.items()
            if (key := keys_by_digest.get(principal)) is not None
        }
        self.table = KeyTable(MappingProxyType(keys_by_digest | tokens), is_closed)
        self._is_open = not self.table.keys and not is_closed and not self.has_identities
        self._scopes = SCOPES if self.has_identities else self.table.scopes

    @property
    def fixed_names(self) -> frozenset[str]:
        """Names of the keys of the settings."""
        return frozenset(key.name for key in self._fixed_keys)

    @property
    def has_identities(self) -> bool:
        """Whether people may come without a key."""
        return self._person_scopes is not None

    @property
    def fixed_scopes(self) -> frozenset[Scope]:
        """The scopes of people and of the keys of the settings."""
        scopes = frozenset(scope for key in self._fixed_keys for scope in key.scopes)
        return scopes | (self._person_scopes or frozenset())

    def fixed_key(self, name: str) -> Key | None:
        """The key of the settings of that name."""
        return next((key for key in self._fixed_keys if key.name == name), None)

    @property
    def priority_classes(self) -> int:
        """How many classes of priority the callers of engines have; at least one."""
        priorities = {key.priority for key in self.table.keys.values() if "inference" in key.scopes}
        return max(1, len(priorities))

    @property
    def is_open(self) -> bool:
        return self._is_open

    def allows(self, key: Key, need: Scope) -> bool:
        """Whether a caller that was admitted with `key` still has the scope `need`."""
        if key is ANONYMOUS_KEY:
            return self._is_open
        present_key = self.table.keys.get(key.digest)
        return (
            present_key is not None and need in present_key.scopes and not present_key.has_ended()
        )

    def admit(self, headers: Iterable[tuple[bytes, bytes]], need: Scope, address: str = "") -> Key:
        """The caller with these (lower-case) ASGI headers, after a check of the scope `need`.
        Raises BadRequest, and the errors of `authenticate`."""
        single_headers: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in _ACCESS_HEADERS:
                if name in single_headers:
                    raise BadRequest(
                        f"The request has two {name.decode()} headers.", hint="Send only one."
                    )
                single_headers[name] = value
        return self.authenticate(single_headers, need, address)

    def authenticate(self, headers: Mapping[bytes, bytes], need: Scope, address: str) -> Key:
        """The caller with these headers, of which none occurs twice. Raises Forbidden, and the
        errors of `check`."""
        if self._is_open:
            origin = headers.get(b"origin")
            welcome = self._is_welcome(origin, need)
            check_local(
                headers.get(b"host"), None if welcome else origin, has_same_port=need != "inference"
            )
            if need != "inference" and not welcome:
                check_site(headers.get(b"sec-fetch-site"))
            return ANONYMOUS_KEY
        return self.check(headers.get(b"authorization"), need, address)

    def _is_welcome(self, origin: bytes | None, need: Scope) -> bool:
        """Whether pages of that origin may call without a key. Pages of all origins (`*`) may not
        start programs here."""
        return self._origins.names(origin) or (
            need == "inference" and EVERY_ORIGIN in self._origins.named_origins
        )

    def check(self, authorization: bytes | None, need: Scope, address: str = "") -> Key:
        """The caller with this header. Raises Unauthorized without a valid key, Forbidden for a key
        without the scope `need`, RateLimited (`FailedLogins`)."""
        if self._is_open:
            return ANONYMOUS_KEY
        if need not in self._scopes:
            api = "inference API is" if need == "inference" else "admin API is"
            name = "API" if need == "inference" else "admin"
            raise Forbidden(
                f"The {api} closed: no {name} key is configured.",
                hint="Set FITSERVE_ADMIN_KEY and restart.",
            )
        if authorization is None:
            raise Unauthorized(
                "This request needs a key.", hint="Send the header `Authorization: Bearer KEY`."
            )
        scheme, _, token = authorization.partition(b" ")
        token = token.strip()
        if scheme.lower() != b"bearer" or not token:
            raise Unauthorized(
                "The Authorization header is not a bearer key.",
                hint="Send `Authorization: Bearer KEY`.",
            )
        # The time of the look-up depends on the digest of the sent token, not on the token, so it
        # reveals nothing about a key.
        digest = hash_key(token)
        key = self.table.keys.get(digest)
        if (
            not hmac.compare_digest(digest, _NO_DIGEST if key is None else key.digest)
            or key is None
        ):
            self._failed_logins.count_wrong_key(address)
            raise Unauthorized(
                "The key is not valid at this gateway.",
                hint="Check it for missing or extra characters.",
            )
        if key.has_ended():
            raise Unauthorized(
                f"The key '{key.name}' has expired.",
                hint="Ask the operator for a new key: `fitserve keys add NAME --expires DAY`.",
            )
        if key.is_guessable:
            self._failed_logins.accept_guessable_key(address, digest)
        if need not in key.scopes:
            raise Forbidden(
                f"This key has only the scope {' and '.join(sorted(key.scopes))}.",
                hint=f"Use a key with the scope {need}.",
            )
        return key


def check_local(host: bytes | None, origin: bytes | None, *, has_same_port: bool = False) -> None:
    """Reject web pages at a gateway without keys: Host shows DNS rebinding, Origin a foreign page.
    `has_same_port`: only pages of this very port may call, not those of other local programs.
    Raises Forbidden."""
    if host is None or not _LOCAL_HOST.fullmatch(host):
        raise Forbidden(
            "Without a key this gateway answers only to localhost, and the Host header names"
            " another host.",
            hint="Use http://127.0.0.1 or http://localhost, or set FITSERVE_ADMIN_KEY.",
        )
    if origin is None:
        return
    if not _LOCAL_ORIGIN.fullmatch(origin) or (
        has_same_port and origin.partition(b"://")[2].lower() != host.lower()
    ):
        raise Forbidden(
            "Without a key this gateway accepts no requests from web pages of another origin.",
            hint=(
                "Set FITSERVE_ADMIN_KEY and send it, name the origin in FITSERVE_ORIGINS, or call"
                " from this machine."
            ),
        )


def check_site(site: bytes | None) -> None:
    """Reject a browser that acts for a page of another origin, by its header Sec-Fetch-Site; also
    where it only follows a link. Raises Forbidden."""
    if site not in _OWN_SITES:
        raise Forbidden(
            "Without a key this gateway accepts no requests that a page of another origin causes.",
            hint=(
                "Open the address yourself, set FITSERVE_ADMIN_KEY, or name the origin in"
                " FITSERVE_ORIGINS."
            ),
        )
