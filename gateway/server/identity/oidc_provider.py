"""The OpenID Connect provider of FITSERVE_OIDC_ISSUER, by Authlib and joserfc.

Discovery and keys are read when they are needed, and again after an hour. A token with an unknown
key has the keys read again, at most every half minute. A provider that fails has a rest.
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from authlib.common.urls import add_params_to_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import ExpiredTokenError, InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from gateway.errors import Forbidden, NotReady, Unauthorized, short_reason
from gateway.logging import Logger
from gateway.secret import Secret
from gateway.server.identity.login_attempts import LoginAttempt
from gateway.server.identity.person import Person, make_person

log = Logger("fitserve.oidc")

CALLBACK_PATH = "/auth/callback"
# Difference between the clocks of provider and gateway.
LEEWAY_S = 60
_TIMEOUT_S = 10.0
_LIFE_S = 3600.0
_MIN_READ_S = 30.0
# Rest of a provider that cannot be read, so that no request waits behind many others.
_REST_S = 5.0
_MAX_BYTES = 1024 * 1024
# Signatures by public keys only, so that a client's secret signs nothing.
_ALGORITHMS = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
    "Ed25519",
)
_KEY_TYPES = frozenset({"RSA", "EC", "OKP"})
_GOOGLE = "https://accounts.google.com"
_LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class OidcSettings:
    """Settings of the provider and of this client.

    url: the gateway's own address for browsers.
    audience: audience of bearer tokens.
    """

    issuer: str
    client_id: str
    client_secret: Secret | None
    url: str
    audience: str
    user_claim: str
    groups_claim: str
    scopes: str


@dataclass(frozen=True, slots=True)
class SignedPerson:
    """A person by a checked token.

    ends_at: Unix time of the token's end, with the difference between clocks.
    """

    person: Person
    token: Secret
    ends_at: float


class OidcProvider:
    """Signs people in, and checks bearer tokens."""

    def __init__(self, settings: OidcSettings) -> None:
        self._settings = settings
        self._lock = asyncio.Lock()
        self._metadata: Mapping[str, Any] = {}
        self._metadata_at = self._keys_at = self._failed_at = -_LIFE_S
        self._keys: KeySet | None = None
        self._failure = ""
        """The cause why the provider could not be read."""

    async def login_url(self, attempt: LoginAttempt) -> str:
        """The address of the provider for one login. Raises NotReady."""
        metadata = await self._read_metadata()
        fields = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": self._redirect_uri,
            "scope": self._settings.scopes,
            "state": attempt.state.reveal(),
            "nonce": attempt.nonce.reveal(),
            "code_challenge": create_s256_code_challenge(attempt.verifier.reveal()),
            "code_challenge_method": "S256",
        }
        return str(add_params_to_uri(metadata["authorization_endpoint"], fields))

    async def sign_in(self, code: str, issuer: str | None, attempt: LoginAttempt) -> SignedPerson:
        """The person with the provider's answer to a login.

        issuer: issuer that the answer names (RFC 9207).

        Raises Unauthorized, Forbidden, NotReady.
        """
        metadata = await self._read_metadata()
        is_named = metadata.get("authorization_response_iss_parameter_supported") is True
        if (issuer is not None or is_named) and issuer != self._settings.issuer:
            raise _refused_error("its answer names another issuer")
        try:
            token = await self._exchange_code(metadata["token_endpoint"], code, attempt)
        except httpx.HTTPError as error:
            raise self._unreachable_error(short_reason(error)) from None
        except ValueError as error:
            raise _refused_error(f"it gave no token, as {error}") from None
        id_token = token.get("id_token")
        if not isinstance(id_token, str):
            raise _refused_error("it gave no ID token")
        decoded = await self._decode(id_token)
        claims = CodeIDToken(
            decoded.claims,
            decoded.header,
            {
                "iss": {"essential": True, "values": _issuers(self._settings.issuer)},
                "aud": {"essential": True, "values": [self._settings.client_id]},
            },
            {
                "nonce": attempt.nonce.reveal(),
                "client_id": self._settings.client_id,
                "access_token": token.get("access_token"),
            },
        )
        try:
            claims.validate(leeway=LEEWAY_S)
        except (JoseError, ValueError, TypeError) as error:
            raise _refused_error(f"its ID token is not valid ({type(error).__name__})") from None
        person_claims = await self._complete_claims(decoded.claims, token.get("access_token"))
        return self._signed_person(person_claims, id_token)

    async def check(self, token: str) -> SignedPerson:
        """The person with a bearer token for the admin API. Raises Unauthorized, Forbidden,
        NotReady."""
        decoded = await self._decode(token)
        registry = jwt.JWTClaimsRegistry(
            leeway=LEEWAY_S,
            iss={"essential": True, "values": _issuers(self._settings.issuer)},
            aud={"essential": True, "value": self._settings.audience},
            exp={"essential": True},
        )
        try:
            registry.validate(decoded.claims)
        except ExpiredTokenError:
            raise Unauthorized("The token has expired.", hint="Get a new one.") from None
        except (JoseError, ValueError, TypeError) as error:
            raise Unauthorized(
                f"The token is not for this gateway ({type(error).__name__}).",
                hint="Get one of the issuer and for the audience of this gateway.",
            ) from None
        return self._signed_person(decoded.claims, token)

    async def logout_url(self, id_token: Secret) -> str | None:
        """The address at which the provider ends its own session; None: it has none."""
        metadata = await self._read_metadata()
        endpoint = metadata.get("end_session_endpoint")
        if not is_safe_url(endpoint):
            return None
        fields = {
            "id_token_hint": id_token.reveal(),
            "client_id": self._settings.client_id,
            "post_logout_redirect_uri": f"{self._settings.url}/",
        }
        return str(add_params_to_uri(endpoint, fields))

    async def _complete_claims(
        self, claims: Mapping[str, Any], access_token: object
    ) -> Mapping[str, Any]:
        """The claims of an ID token, and those that the provider gives only at its UserInfo
        endpoint (OpenID Connect Core 1.0, sections 5.3 and 5.4). Raises Unauthorized, NotReady.

        A provider without that endpoint, or one that fails, leaves the claims as they are where
        they name the user.
        """
        settings = self._settings
        is_named = isinstance(claims.get(settings.user_claim), str) and (
            settings.user_claim != "email" or "email_verified" in claims
        )
        if is_named and find_claim(claims, settings.groups_claim) is not None:
            return claims
        url = self._metadata.get("userinfo_endpoint")
        if not is_safe_url(url) or not isinstance(access_token, str):
            return claims
        try:
            info = await _read_json("GET", str(url), bearer=access_token)
        except (httpx.HTTPError, ValueError) as error:
            if not is_named:
                raise self._unreachable_error(short_reason(error)) from None
            log.warning("the provider gives no UserInfo", problem=short_reason(error))
            return claims
        if not isinstance(claims.get("sub"), str) or info.get("sub") != claims["sub"]:
            raise _refused_error("its UserInfo is of another user")
        if info.get("email") != claims.get("email", info.get("email")):
            # A verification is that of its own address.
            info = {name: value for name, value in info.items() if name != "email_verified"}
        return {**info, **claims}

    def _signed_person(self, claims: Mapping[str, Any], token: str) -> SignedPerson:
        """The person of checked claims. Raises Forbidden, BadRequest."""
        settings = self._settings
        name = claims.get(settings.user_claim)
        if not isinstance(name, str):
            raise Forbidden(
                f"The provider's token has no claim {settings.user_claim}.",
                hint="The operator adds its scope to FITSERVE_OIDC_SCOPES, or names another claim"
                " in FITSERVE_OIDC_USER_CLAIM.",
            )
        if settings.user_claim == "email" and claims.get("email_verified") is not True:
            raise Forbidden(
                f"The provider has not verified the address {name[:200]}.",
                hint="Verify it there, or the operator names another claim in"
                " FITSERVE_OIDC_USER_CLAIM.",
            )
        groups = find_claim(claims, settings.groups_claim)
        groups = [groups] if isinstance(groups, str) else groups
        if groups is None and _has_overage(claims, settings.groups_claim):
            log.warning(
                "the provider left out the groups of a user, as there are too many; let it send"
                " fewer, or roles",
                user=name[:200],
                claim=settings.groups_claim,
            )
        names = (
            [group for group in groups if isinstance(group, str)]
            if isinstance(groups, list)
            else []
        )
        ends_at = float(claims["exp"]) + LEEWAY_S
        return SignedPerson(make_person(name, names), Secret(token), ends_at)

    async def _decode(self, token: str) -> jwt.Token:
        """A token whose signature is right. Raises Unauthorized, NotReady."""
        metadata = await self._read_metadata()
        names = metadata.get("id_token_signing_alg_values_supported")
        algorithms = [name for name in _ALGORITHMS if not names or name in names]
        try:
            try:
                return jwt.decode(token, await self._read_keys(), algorithms=algorithms)
            except InvalidKeyIdError:
                keys = await self._read_keys(is_old=True)
                return jwt.decode(token, keys, algorithms=algorithms)
        except (JoseError, ValueError, TypeError) as error:
            raise Unauthorized(
                f"The token is not valid ({type(error).__name__}).",
                hint="Sign in once more, or get a new token.",
            ) from None

    async def _read_metadata(self) -> Mapping[str, Any]:
        """The description of the provider by itself. Raises NotReady."""
        async with self._lock:
            if time.monotonic() - self._metadata_at < _LIFE_S:
                return self._metadata
            self._check_rest()
            issuer = self._settings.issuer
            try:
                metadata = await _read_json(
                    "GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration"
                )
                _check_metadata(metadata, issuer)
            except (httpx.HTTPError, ValueError) as error:
                if not self._metadata:
                    raise self._first_read_error(error) from None
                log.warning("the OIDC provider cannot be read again", problem=str(error))
                metadata = dict(self._metadata)
            self._metadata, self._metadata_at = metadata, time.monotonic()
            return metadata

    async def _read_keys(self, *, is_old: bool = False) -> KeySet:
        """The provider's keys. Raises NotReady.

        is_old: whether the keys lack one that a token names.
        """
        async with self._lock:
            age_s = time.monotonic() - self._keys_at
            if self._keys is not None and age_s < (_MIN_READ_S if is_old else _LIFE_S):
                return self._keys
            self._check_rest()
            try:
                document = await _read_json("GET", self._metadata["jwks_uri"])
                rows = document.get("keys")
                keys = [row for row in rows if _is_signing_key(row)] if rows else []
                self._keys = KeySet.import_key_set({"keys": keys})
            except (httpx.HTTPError, JoseError, ValueError, TypeError) as error:
                if self._keys is None:
                    raise self._first_read_error(error) from None
                log.warning("the keys of the OIDC provider cannot be read", problem=str(error))
            self._keys_at = time.monotonic()
            return self._keys

    @property
    def _redirect_uri(self) -> str:
        return f"{self._settings.url}{CALLBACK_PATH}"

    async def _exchange_code(self, url: str, code: str, attempt: LoginAttempt) -> Mapping[str, Any]:
        """The tokens for a code. Raises HTTPError, ValueError."""
        client_id = self._settings.client_id
        secret = self._settings.client_secret
        fields = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "code_verifier": attempt.verifier.reveal(),
        }
        if secret is None:
            return await _read_json("POST", url, {**fields, "client_id": client_id})
        password = secret.reveal()
        if self._takes_basic():
            return await _read_json("POST", url, fields, httpx.BasicAuth(client_id, password))
        client_fields = {"client_id": client_id, "client_secret": password}
        return await _read_json("POST", url, {**fields, **client_fields})

    def _takes_basic(self) -> bool:
        """Whether the provider takes the client's secret as HTTP Basic."""
        methods = self._metadata.get("token_endpoint_auth_methods_supported")
        return not isinstance(methods, list) or not methods or "client_secret_basic" in methods

    def _check_rest(self) -> None:
        """Raise NotReady where the provider failed a moment ago and nothing of it is known."""
        is_known = self._metadata and self._keys is not None
        if not is_known and time.monotonic() - self._failed_at < _REST_S:
            raise self._unreachable_error(self._failure)

    def _first_read_error(self, error: Exception) -> NotReady:
        """Note the failure for a rest, and make its error."""
        self._failed_at = time.monotonic()
        self._failure = short_reason(error)
        return self._unreachable_error(self._failure)

    def _unreachable_error(self, reason: str) -> NotReady:
        return NotReady(
            f"The OIDC provider {self._settings.issuer} cannot be used: {reason}.",
            hint="Try again later. A key works meanwhile.",
            retry_after_s=10,
        )


def is_safe_url(url: object) -> bool:
    """Whether secrets may be sent there: https, or http on this machine."""
    if not isinstance(url, str):
        return False
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return bool(host) and (
        parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK_HOSTS)
    )


def find_claim(claims: Mapping[str, Any], path: str) -> Any:
    """The claim of that name, or of that path through objects; None: absent.

    A name may have dots itself, as names that are addresses and ids of clients.
    """
    if path in claims:
        return claims[path]
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        inner_claims = claims.get(".".join(parts[:length]))
        if isinstance(inner_claims, Mapping):
            return find_claim(inner_claims, ".".join(parts[length:]))
    return None


def _issuers(issuer: str) -> list[str]:
    """The names of an issuer in its tokens. Google's may leave out the scheme
    (developers.google.com/identity/openid-connect, ID token's payload)."""
    return [issuer, *([_GOOGLE.removeprefix("https://")] if issuer == _GOOGLE else [])]


def _has_overage(claims: Mapping[str, Any], name: str) -> bool:
    """Whether a token only says that the user has groups, as Entra does beyond 200 groups
    (OpenID Connect Core 1.0, section 5.6.2)."""
    sources = claims.get("_claim_names")
    return claims.get("hasgroups") is True or (isinstance(sources, Mapping) and name in sources)


def _check_metadata(metadata: Mapping[str, Any], issuer: str) -> None:
    """Raise ValueError for a discovery of another issuer, or one that leads to unsafe addresses."""
    if metadata.get("issuer") != issuer:
        raise ValueError(f"it names the issuer {str(metadata.get('issuer'))[:200]}")
    for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
        if not is_safe_url(metadata.get(name)):
            raise ValueError(f"its {name} is missing or not https")


def _is_signing_key(row: object) -> bool:
    """Whether a key of the set can check signatures. Sets also have keys for encryption."""
    return isinstance(row, dict) and row.get("kty") in _KEY_TYPES and row.get("use", "sig") == "sig"


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """The trusted certificates, read once, as the event loop stands meanwhile."""
    return httpx.create_ssl_context()


async def _read_json(
    method: str,
    url: str,
    fields: Mapping[str, str] | None = None,
    auth: httpx.BasicAuth | None = None,
    *,
    bearer: str | None = None,
) -> dict[str, Any]:
    """The JSON object of an answer. Raises HTTPError, ValueError."""
    data = b""
    headers = {"accept": "application/json"}
    if bearer is not None:
        headers["authorization"] = f"Bearer {bearer}"
    try:
        async with (
            asyncio.timeout(_TIMEOUT_S),
            httpx.AsyncClient(timeout=_TIMEOUT_S, verify=_tls_context()) as client,
            client.stream(method, url, data=fields, auth=auth, headers=headers) as answer,
        ):
            if answer.is_server_error:
                answer.raise_for_status()
            if answer.status_code != httpx.codes.OK:
                raise ValueError(f"it answers with status {answer.status_code}")
            async for piece in answer.aiter_bytes():
                data += piece
                if len(data) > _MAX_BYTES:
                    raise ValueError(f"its answer is over {_MAX_BYTES} bytes")
    except TimeoutError:
        raise httpx.ReadTimeout(f"its answer takes over {_TIMEOUT_S:g} s") from None
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("its answer is not a JSON object")  # noqa: TRY004
    return document


def _refused_error(reason: str) -> Unauthorized:
    return Unauthorized(
        f"The login failed, as the answer of the provider cannot be trusted: {reason}.",
        hint="Sign in once more. The operator compares FITSERVE_OIDC_* with the provider.",
    )
