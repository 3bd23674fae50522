"""Callers by identity: of a trusted proxy, of a session, or of a bearer token of the provider.

A page exchanges its identity for a token of an hour, which is its key for every call. So the data
plane knows only keys, and no cookie opens the API.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from gateway.domain.grant import Allowance
from gateway.domain.value import first_problem
from gateway.errors import Forbidden, SettingsError, Unauthorized
from gateway.keys import Scope
from gateway.proxy.access.auth import Key, Keys
from gateway.proxy.access.budgets import KeyBudget
from gateway.secret import Secret
from gateway.server.identity.login_attempts import LoginAttempts
from gateway.server.identity.login_tokens import LoginTokens
from gateway.server.identity.person import Person, Roles, key_of_person
from gateway.server.identity.proxy_header import Headers, ProxyHeader, check_page
from gateway.server.identity.sessions import Session, Sessions
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.server.identity.oidc_provider import OidcProvider

TOKEN_S = 3600.0
# A JSON Web Token in compact form: three parts, of which the first begins with `{"`.
_TOKEN_START = b"eyJ"
_TOKEN_DOTS = 2


@dataclass(frozen=True, slots=True)
class PageToken:
    """The key of a page.

    can_end: whether its session can be ended here.
    """

    key: Secret
    name: str
    scopes: frozenset[Scope]
    ends_at: float
    can_end: bool


PersonBudgets = Callable[[str, Collection[str]], tuple[KeyBudget, ...]]


class Identities:
    """Finds the caller of a request that sends no key.

    proxy, provider: None where that way is not configured.
    session_s: longest time of a session.
    """

    def __init__(
        self,
        keys: Keys,
        roles: Roles,
        proxy: ProxyHeader | None,
        provider: OidcProvider | None,
        session_s: float,
    ) -> None:
        self.provider = provider
        self.proxy = proxy
        self.attempts = LoginAttempts()
        self._keys = keys
        self._roles = roles
        self._session_s = session_s
        self._sessions = Sessions()
        self._login_tokens = LoginTokens()
        self._person_budgets: PersonBudgets = lambda *_: ()
        self._refresh_budgets: Callable[[str], object] = lambda _: None
        self._on_change: Callable[[], object] = lambda: None

    def adopt_keyring(
        self,
        person_budgets: PersonBudgets,
        refresh_budgets: Callable[[str], object],
        on_change: Callable[[], object],
    ) -> None:
        """Take the functions that exist once the stored keys are loaded.

        person_budgets: the budgets of a person, by name in lists and groups; it may write to the
            disk.
        refresh_budgets: gives a person's page keys the present budgets, by name in lists; it may
            write too.
        on_change: called after each change of the valid tokens.
        """
        self._person_budgets = person_budgets
        self._refresh_budgets = refresh_budgets
        self._on_change = on_change

    async def caller(
        self, headers: Headers, need: Scope, peer: str, address: str | None = None
    ) -> Key | None:
        """The caller of a request of the admin API; None: the keys decide. Raises Forbidden,
        BadRequest, Unauthorized, NotReady.

        peer: the address of the connection, which alone may be that of a proxy.
        address: that of the client, to which wrong tokens count; None: the peer.
        """
        headers = list(headers)
        person = self.proxy.person(headers, peer) if self.proxy is not None else None
        tokens = [value for name, value in headers if name == b"authorization"]
        if need == "inference":
            return None
        if not tokens and person is not None:
            check_page(headers, is_from_proxy=True)
            ends_at = time.time() + TOKEN_S
            return _check_scope(key_of_person(person, self._roles.scopes_of(person), ends_at), need)
        token = tokens[0].partition(b" ")[2].strip() if len(tokens) == 1 else b""
        if self.provider is None or not _is_signed_token(token):
            return None
        text = token.decode("latin-1")
        try:
            self._login_tokens.check(text)
            signed_person = await self.provider.check(text)
        except Unauthorized:
            self._keys.count_wrong_key(peer if address is None else address)
            raise
        scopes = self._roles.scopes_of(signed_person.person)
        return _check_scope(
            key_of_person(signed_person.person, scopes, signed_person.ends_at), need
        )

    def open_session(
        self, person: Person, token: Secret, token_ends_at: float
    ) -> tuple[Secret, float]:
        """The cookie of a session of a person that signed in, and its seconds. Raises
        Forbidden."""
        self._login_tokens.add(token, token_ends_at)
        scopes = self._roles.scopes_of(person)
        session = Session(person, scopes, time.time() + self._session_s, token)
        return self._sessions.open(session), self._session_s

    def close_session(self, cookie: str) -> Session | None:
        """End a session with all its tokens. Returns it; None: there was none."""
        session = self._sessions.close(cookie)
        if session is not None:
            self._keys.close_sessions(session.person.key_name)
            self._on_change()
        return session

    def check_page(self, headers: Headers, address: str) -> None:
        """Refuse a browser that acts for a page of another origin. Raises Forbidden.

        address: that of the connection.
        """
        is_from_proxy = self.proxy is not None and self.proxy.trusts(address)
        check_page(headers, is_from_proxy=is_from_proxy)

    async def page_token(self, headers: Headers, address: str, cookie: str | None) -> PageToken:
        """A token for the page of a person. Raises Unauthorized, Forbidden, BadRequest."""
        headers = list(headers)
        self.check_page(headers, address)
        person = self.proxy.person(headers, address) if self.proxy is not None else None
        session = self._sessions.find(cookie) if cookie is not None else None
        ends_at = time.time() + TOKEN_S
        if person is not None:
            scopes = self._roles.scopes_of(person)
        elif session is not None:
            person = session.person
            scopes = session.scopes
            ends_at = min(ends_at, session.ends_at)
        else:
            raise Unauthorized("Nobody is signed in.", hint="Sign in, or send a key.")
        budgets = await asyncio.to_thread(self._person_budgets, person.key_name, person.groups)
        if session is not None and (cookie is None or self._sessions.find(cookie) is None):
            raise Unauthorized("The session has ended.", hint="Sign in, or send a key.")
        key = self._keys.open_session(person.key_name, scopes, ends_at, budgets)
        self._on_change()
        await asyncio.to_thread(self._refresh_budgets, person.key_name)
        return PageToken(key, person.name, scopes, ends_at, can_end=session is not None)


def _is_signed_token(token: bytes) -> bool:
    return token.startswith(_TOKEN_START) and token.count(b".") == _TOKEN_DOTS


def _check_scope(key: Key, need: Scope) -> Key:
    """The caller, after a check of the scope. Raises Forbidden."""
    if need not in key.scopes:
        raise Forbidden(
            f"The role of {key.name} has only the scope {' and '.join(sorted(key.scopes))}.",
            hint=f"The operator adds it to the scope {need} in FITSERVE_ROLES.",
        )
    return key


def person_scopes(settings: Settings) -> frozenset[Scope] | None:
    """The scopes that people can have; None: a key is needed for everything."""
    if not settings.proxy_user_header and not settings.oidc_issuer:
        return None
    return frozenset(scope for scope, members in settings.roles.items() if members)


def build_identities(settings: Settings, keys: Keys) -> Identities | None:
    """The identities of the settings; None: none are configured. Raises SettingsError."""
    scopes = person_scopes(settings)
    if scopes is None:
        return None
    if not scopes:
        raise SettingsError(
            "FITSERVE_ROLES is empty, so no user of the proxy or of OIDC may do anything.",
            hint="Set it, such as FITSERVE_ROLES='admin=group:ops read=*'.",
        )
    proxy = _proxy_header(settings) if settings.proxy_user_header else None
    provider = _provider(settings) if settings.oidc_issuer else None
    return Identities(keys, Roles(settings.roles), proxy, provider, settings.oidc_session_s)


def person_allowance(settings: Settings) -> Allowance | None:
    """The budget of each person; None: people have none. Raises SettingsError."""
    if not settings.person_budget:
        return None
    try:
        return Allowance.model_validate(settings.person_budget)
    except ValidationError as error:
        raise SettingsError(
            f"FITSERVE_PERSON_BUDGET: {first_problem(error, Allowance.model_fields)}.",
            hint="Give limits such as tokens_per_day=100000 requests_per_month=5000.",
        ) from None


def _proxy_header(settings: Settings) -> ProxyHeader:
    networks = [ipaddress.ip_network(text, strict=False) for text in settings.proxy_networks]
    if not networks:
        raise SettingsError(
            "FITSERVE_PROXY_USER_HEADER is set, and no address may send it.",
            hint="Set FITSERVE_PROXY_ADDRESSES to the addresses of the proxy.",
        )
    groups = settings.proxy_groups_header.lower() or None
    return ProxyHeader(
        settings.proxy_user_header.lower(), groups, networks, settings.proxy_groups_separator
    )


def _provider(settings: Settings) -> OidcProvider:
    """The OpenID provider of the settings. Raises SettingsError."""
    _check_present(
        {
            "FITSERVE_OIDC_CLIENT_ID": settings.oidc_client_id,
            "FITSERVE_OIDC_URL": settings.oidc_url,
        }
    )
    try:
        from gateway.server.identity.oidc_provider import OidcProvider, OidcSettings, is_safe_url
    except ModuleNotFoundError as error:
        raise SettingsError(
            "FITSERVE_OIDC_ISSUER is set, and the library for OpenID Connect is not installed"
            f" ({error.name}).",
            hint=(
                "Run `pip install '.[oidc]'` in a clone of the repository, or unset the variable."
            ),
        ) from None
    for name in ("oidc_issuer", "oidc_url"):
        if not is_safe_url(getattr(settings, name)):
            raise SettingsError(
                f"FITSERVE_{name.upper()} is not an https address.",
                hint="Use https; http is possible on this machine only (http://localhost:8080).",
            )
    return OidcProvider(
        OidcSettings(
            issuer=settings.oidc_issuer,
            client_id=settings.oidc_client_id,
            client_secret=settings.oidc_client_secret,
            url=settings.oidc_url.rstrip("/"),
            audience=settings.oidc_audience or settings.oidc_client_id,
            user_claim=settings.oidc_user_claim,
            groups_claim=settings.oidc_groups_claim,
            scopes=settings.oidc_scopes,
        )
    )


def _check_present(values: dict[str, str]) -> None:
    missing_names: Iterable[str] = [name for name, value in values.items() if not value]
    if missing_names:
        raise SettingsError(
            f"FITSERVE_OIDC_ISSUER is set without {' and '.join(missing_names)}.",
            hint="docs/security.md describes the settings of OpenID Connect.",
        )
