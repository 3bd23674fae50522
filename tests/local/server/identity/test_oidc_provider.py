"""Tokens of a provider that a test writes: which are taken, and which never."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("authlib", reason="needs the extra packages oidc")

from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc.jwk import ECKey, RSAKey

from gateway.errors import FitserveError, Forbidden, NotReady, Unauthorized
from gateway.secret import Secret
from gateway.server.identity.login_attempts import LoginAttempt, LoginAttempts
from gateway.server.identity.oidc_provider import (
    LEEWAY_S,
    OidcProvider,
    OidcSettings,
    SignedPerson,
    _issuers,
)
from gateway.server.identity.person import Person
from tests.support.oidc_servers import ScriptedProvider, shared_secret_token, unsigned_token

pytestmark = pytest.mark.anyio

MODULE = "gateway.server.identity.oidc_provider"


@pytest.fixture
def provider_server() -> Iterator[ScriptedProvider]:
    with ScriptedProvider() as provider:
        yield provider


def client(provider_server: ScriptedProvider, **changes: Any) -> OidcProvider:
    fields: dict[str, Any] = {
        "issuer": provider_server.url,
        "client_id": "fitserve",
        "client_secret": Secret("a-secret-of-the-client"),
        "url": "https://gw.example",
        "audience": "fitserve",
        "user_claim": "email",
        "groups_claim": "groups",
        "scopes": "openid email",
    }
    return OidcProvider(OidcSettings(**fields | changes))


def attempt() -> LoginAttempt:
    return LoginAttempts().create()[0]


async def test_a_good_token_names_a_person_with_groups(provider_server: ScriptedProvider) -> None:
    claims = provider_server.claims(groups=["ops", 7, "staff"])
    signed = await client(provider_server).check(provider_server.sign(claims))
    assert signed.person.name == "ann@example.org"
    assert signed.person.groups == {"ops", "staff"}
    assert signed.ends_at == claims["exp"] + LEEWAY_S


async def test_clocks_may_differ_by_a_minute(provider_server: ScriptedProvider) -> None:
    now, provider = int(time.time()), client(provider_server)
    for changes in ({"exp": now - 30}, {"nbf": now + 30}, {"iat": now + 30}):
        await provider.check(provider_server.sign(provider_server.claims(**changes)))
    for changes in ({"exp": now - 120}, {"nbf": now + 120}, {"iat": now + 120}):
        with pytest.raises(Unauthorized):
            await provider.check(provider_server.sign(provider_server.claims(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"iss": "https://evil.example"},
        {"iss": None},
        {"aud": "other"},
        {"aud": ["other", "more"]},
        {"aud": None},
        {"exp": None},
        {"exp": "soon"},
        {"exp": 1},
    ],
    ids=str,
)
async def test_a_token_that_is_not_for_us_is_refused(
    provider_server: ScriptedProvider, changes: dict[str, Any]
) -> None:
    with pytest.raises(Unauthorized):
        await client(provider_server).check(provider_server.sign(provider_server.claims(**changes)))


async def test_a_signature_of_another_key_or_kind_is_refused(
    provider_server: ScriptedProvider,
) -> None:
    claims, provider = provider_server.claims(), client(provider_server)
    public_pem = provider_server.key.as_pem(private=False)
    good = provider_server.sign(claims)
    forged = [
        provider_server.sign(claims, RSAKey.generate_key(2048, {"kid": "one"})),
        shared_secret_token(claims, public_pem),
        shared_secret_token(claims, b"a-secret-of-the-client"),
        unsigned_token(claims),
        good[:-4] + "AAAA",
        good.rpartition(".")[0] + ".",
        "eyJ.x.y",
        "..",
    ]
    for token in forged:
        with pytest.raises(Unauthorized):
            await provider.check(token)
    await provider.check(good)


async def test_an_algorithm_that_the_provider_does_not_name_is_refused(
    provider_server: ScriptedProvider,
) -> None:
    provider_server.extra = {"id_token_signing_alg_values_supported": ["ES256", "HS256"]}
    with pytest.raises(Unauthorized):
        await client(provider_server).check(provider_server.sign(provider_server.claims()))
    provider_server.key = ECKey.generate_key("P-256", {"kid": "two"})
    provider_server.published = [provider_server.key]
    await client(provider_server).check(provider_server.sign(provider_server.claims()))


async def test_a_new_key_is_read_and_an_unknown_one_not_again_and_again(
    provider_server: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic() + 10_000
    monkeypatch.setattr(f"{MODULE}.time.monotonic", lambda: clock)
    provider = client(provider_server)
    await provider.check(provider_server.sign(provider_server.claims()))
    new_key = RSAKey.generate_key(2048, {"kid": "two"})
    provider_server.published.append(new_key)
    clock += 31
    await provider.check(provider_server.sign(provider_server.claims(), new_key))
    assert provider_server.count("/jwks") == 2
    unknown = provider_server.sign(
        provider_server.claims(), RSAKey.generate_key(2048, {"kid": "three"})
    )
    for _ in range(5):
        with pytest.raises(Unauthorized):
            await provider.check(unknown)
    assert provider_server.count("/jwks") == 2
    provider_server.published = [new_key]
    clock += 3601
    with pytest.raises(Unauthorized):  # withdrawn
        await provider.check(provider_server.sign(provider_server.claims()))


async def test_a_provider_that_is_away_ends_no_login_of_a_known_key(
    provider_server: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic() + 10_000
    monkeypatch.setattr(f"{MODULE}.time.monotonic", lambda: clock)
    provider_server.is_away = True
    with pytest.raises(NotReady, match="cannot be used"):
        await client(provider_server).check(provider_server.sign(provider_server.claims()))
    provider_server.is_away = False
    provider = client(provider_server)
    await provider.check(provider_server.sign(provider_server.claims()))
    provider_server.is_away = True
    clock += 4000
    await provider.check(provider_server.sign(provider_server.claims()))


async def test_a_provider_that_is_away_has_a_rest(
    provider_server: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic() + 10_000
    monkeypatch.setattr(f"{MODULE}.time.monotonic", lambda: clock)
    provider_server.is_away = True
    provider = client(provider_server)
    for _ in range(5):
        with pytest.raises(NotReady, match="cannot be used"):
            await provider.login_url(attempt())
    assert provider_server.count("/.well-known/openid-configuration") == 1
    provider_server.is_away = False
    clock += 6
    assert await provider.login_url(attempt())


async def test_a_token_endpoint_that_is_away_is_an_error_in_words(
    provider_server: ScriptedProvider,
) -> None:
    provider = client(provider_server)
    await provider.login_url(attempt())
    provider_server.is_away = True
    with pytest.raises(NotReady, match="cannot be used"):
        await provider.sign_in("a-code", None, attempt())


@pytest.mark.parametrize(
    ("extra", "secret", "fields"),
    [
        ({}, Secret("s"), {}),
        (
            {"token_endpoint_auth_methods_supported": ["client_secret_post"]},
            Secret("s"),
            {"client_id": ["fitserve"], "client_secret": ["s"]},
        ),
        ({}, None, {"client_id": ["fitserve"]}),
    ],
    ids=["basic", "post", "public"],
)
async def test_the_client_shows_its_secret_as_the_provider_takes_it(
    provider_server: ScriptedProvider,
    extra: dict[str, Any],
    secret: Secret | None,
    fields: dict[str, list[str]],
) -> None:
    provider_server.extra = extra
    login = attempt()
    provider_server.token = provider_server.sign(provider_server.claims(nonce=login.nonce.reveal()))
    await client(provider_server, client_secret=secret).sign_in("a-code", None, login)
    (body,) = [body for path, body in provider_server.requests if path == "/token"]
    sent = parse_qs(body)
    assert {name: sent[name] for name in sent if name.startswith("client_")} == fields


async def test_an_answer_with_too_many_bytes_is_refused(provider_server: ScriptedProvider) -> None:
    provider_server.token = "x" * (2 * 1024 * 1024)
    with pytest.raises(Unauthorized, match="over 1048576 bytes"):
        await client(provider_server).sign_in("a-code", None, attempt())


@pytest.mark.parametrize("groups", [7, True, {"ops": 1}, [["ops"]]], ids=str)
async def test_a_claim_of_another_form_names_no_group(
    provider_server: ScriptedProvider, groups: object
) -> None:
    token = provider_server.sign(provider_server.claims(groups=groups))
    assert (await client(provider_server).check(token)).person.groups == frozenset()


@pytest.mark.parametrize(
    "extra",
    [
        {"issuer": "https://other.example"},
        {"token_endpoint": "http://other.example/token"},
        {"jwks_uri": None},
        {"authorization_endpoint": "ftp://x/y"},
    ],
    ids=str,
)
async def test_a_discovery_that_leads_elsewhere_is_refused(
    provider_server: ScriptedProvider, extra: dict[str, Any]
) -> None:
    provider_server.extra = extra
    with pytest.raises(NotReady):
        await client(provider_server).login_url(attempt())


async def test_a_login_asks_with_state_nonce_and_a_challenge(
    provider_server: ScriptedProvider,
) -> None:
    login, provider = attempt(), client(provider_server)
    url = urlsplit(await provider.login_url(login))
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    assert query == {
        "response_type": "code",
        "client_id": "fitserve",
        "redirect_uri": "https://gw.example/auth/callback",
        "scope": "openid email",
        "state": login.state.reveal(),
        "nonce": login.nonce.reveal(),
        "code_challenge": create_s256_code_challenge(login.verifier.reveal()),
        "code_challenge_method": "S256",
    }
    provider_server.token = provider_server.sign(provider_server.claims(nonce=login.nonce.reveal()))
    signed = await provider.sign_in("a-code", None, login)
    assert signed.person.name == "ann@example.org"
    (body,) = [body for path, body in provider_server.requests if path == "/token"]
    fields = {name: values[0] for name, values in parse_qs(body).items()}
    assert fields["code_verifier"] == login.verifier.reveal()
    assert fields["redirect_uri"] == "https://gw.example/auth/callback"
    assert (fields["grant_type"], fields["code"]) == ("authorization_code", "a-code")


async def test_a_replayed_id_token_is_refused(provider_server: ScriptedProvider) -> None:
    provider, login = client(provider_server), attempt()
    for nonce in (attempt().nonce.reveal(), None, ""):
        provider_server.token = provider_server.sign(provider_server.claims(nonce=nonce))
        with pytest.raises(Unauthorized, match="ID token is not valid"):
            await provider.sign_in("a-code", None, login)


async def test_an_id_token_for_another_client_is_refused(provider_server: ScriptedProvider) -> None:
    provider, login = client(provider_server), attempt()
    for changes in (
        {"aud": "other"},
        {"aud": ["fitserve", "other"], "azp": "other"},
        {"iss": "https://evil.example"},
        {"at_hash": "wrong"},
        {"exp": int(time.time()) - 120},
        {"sub": None},
    ):
        claims = provider_server.claims(nonce=login.nonce.reveal(), **changes)
        provider_server.token = provider_server.sign(claims)
        with pytest.raises(Unauthorized):
            await provider.sign_in("a-code", None, login)


async def test_an_answer_of_another_issuer_is_refused(provider_server: ScriptedProvider) -> None:
    login, provider = attempt(), client(provider_server)
    provider_server.token = provider_server.sign(provider_server.claims(nonce=login.nonce.reveal()))
    await provider.sign_in("a-code", provider_server.url, login)
    with pytest.raises(Unauthorized, match="another issuer"):
        await provider.sign_in("a-code", "https://evil.example", login)
    provider_server.extra = {"authorization_response_iss_parameter_supported": True}
    with pytest.raises(Unauthorized, match="another issuer"):
        await client(provider_server).sign_in("a-code", None, login)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"email_verified": False}, "has not verified"),
        ({"email_verified": "true"}, "has not verified"),
        ({"email_verified": None}, "has not verified"),
        ({"email": None}, "no claim email"),
        ({"email": ["ann@example.org"]}, "no claim email"),
    ],
    ids=str,
)
async def test_only_a_verified_address_names_a_user(
    provider_server: ScriptedProvider, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(Forbidden, match=words):
        await client(provider_server).check(provider_server.sign(provider_server.claims(**changes)))


async def test_another_claim_names_the_user_where_it_is_chosen(
    provider_server: ScriptedProvider,
) -> None:
    provider = client(provider_server, user_claim="sub", groups_claim="roles")
    signed = await provider.check(
        provider_server.sign(provider_server.claims(email_verified=None, roles="ops"))
    )
    assert signed.person.name == "1"
    assert signed.person.groups == {"ops"}


async def test_the_logout_leads_to_the_provider_and_back(provider_server: ScriptedProvider) -> None:
    url = await client(provider_server).logout_url(Secret("an-id-token"))
    assert url is not None
    assert url.startswith(f"{provider_server.url}/logout?")
    assert parse_qs(urlsplit(url).query) == {
        "id_token_hint": ["an-id-token"],
        "client_id": ["fitserve"],
        "post_logout_redirect_uri": ["https://gw.example/"],
    }
    for endpoint in (None, "http://other.example/logout", "javascript:alert(1)"):
        provider_server.extra = {"end_session_endpoint": endpoint}
        assert await client(provider_server).logout_url(Secret("t")) is None


async def test_no_error_shows_a_token_or_a_secret(provider_server: ScriptedProvider) -> None:
    token = provider_server.sign(provider_server.claims(aud="other"))
    with pytest.raises(FitserveError) as refusal:
        await client(provider_server).check(token)
    assert token not in str(refusal.value)
    assert "a-secret-of-the-client" not in repr(client(provider_server).__dict__)


async def sign_in(provider_server: ScriptedProvider, **changes: Any) -> SignedPerson:
    """The person of a login whose ID token has these changes."""
    login = attempt()
    fields = changes.pop("client", {})
    claims = provider_server.claims(nonce=login.nonce.reveal(), **changes)
    provider_server.token = provider_server.sign(claims)
    return await client(provider_server, **fields).sign_in("a-code", None, login)


async def test_claims_of_a_minimal_id_token_come_from_userinfo(
    provider_server: ScriptedProvider,
) -> None:
    """Authelia 4.39 and others put none of a user's claims into the ID token."""
    provider_server.user_info = {
        "sub": "1",
        "email": "ann@example.org",
        "email_verified": True,
        "groups": ["ops"],
        "preferred_username": "ann",
    }
    signed = await sign_in(provider_server, email=None, email_verified=None)
    assert signed.person == Person("ann@example.org", frozenset({"ops"}))
    assert provider_server.info_headers == ["Bearer a"]


async def test_userinfo_is_not_asked_where_the_id_token_has_all(
    provider_server: ScriptedProvider,
) -> None:
    provider_server.user_info = {"sub": "1", "groups": ["admins"]}
    signed = await sign_in(provider_server, groups=[])
    assert signed.person.groups == frozenset()
    assert provider_server.info_headers == []


async def test_userinfo_of_another_user_is_refused(provider_server: ScriptedProvider) -> None:
    for sub in ("2", None, 1):
        provider_server.user_info = {"sub": sub, "groups": ["admins"]}
        with pytest.raises(Unauthorized, match="another user"):
            await sign_in(provider_server)


async def test_userinfo_replaces_no_signed_claim(provider_server: ScriptedProvider) -> None:
    provider_server.user_info = {"sub": "1", "email": "eve@example.org", "groups": ["ops"]}
    signed = await sign_in(provider_server)
    assert signed.person == Person("ann@example.org", frozenset({"ops"}))
    provider_server.user_info |= {"email_verified": True}
    with pytest.raises(Forbidden, match="has not verified"):
        await sign_in(provider_server, email_verified=False)


async def test_a_failing_userinfo_ends_only_a_login_that_needs_it(
    provider_server: ScriptedProvider,
) -> None:
    provider_server.extra = {"userinfo_endpoint": f"{provider_server.url}/nowhere"}
    assert (await sign_in(provider_server)).person.groups == frozenset()
    with pytest.raises(NotReady, match="cannot be used"):
        await sign_in(provider_server, email=None)
    provider_server.extra = {"userinfo_endpoint": "http://other.example/userinfo"}
    with pytest.raises(Forbidden, match="no claim email"):
        await sign_in(provider_server, email=None)


@pytest.mark.parametrize(
    ("path", "claims", "groups"),
    [
        ("realm_access.roles", {"realm_access": {"roles": ["ops", "user"]}}, {"ops", "user"}),
        ("resource_access.gw.roles", {"resource_access": {"gw": {"roles": ["ops"]}}}, {"ops"}),
        ("resource_access.a.b.roles", {"resource_access": {"a.b": {"roles": ["ops"]}}}, {"ops"}),
        ("https://example.org/groups", {"https://example.org/groups": ["ops"]}, {"ops"}),
        ("cognito:groups", {"cognito:groups": ["ops"]}, {"ops"}),
        ("roles", {"roles": ["Gateway.Admin"]}, {"Gateway.Admin"}),
        ("realm_access.roles", {"realm_access": ["roles"]}, set()),
        ("realm_access.roles", {"roles": ["ops"]}, set()),
    ],
    ids=str,
)
async def test_groups_are_found_where_providers_have_them(
    provider_server: ScriptedProvider, path: str, claims: dict[str, Any], groups: set[str]
) -> None:
    provider = client(provider_server, groups_claim=path)
    signed = await provider.check(provider_server.sign(provider_server.claims(**claims)))
    assert signed.person.groups == groups


@pytest.mark.parametrize(
    "claims",
    [
        {
            "_claim_names": {"groups": "src1"},
            "_claim_sources": {"src1": {"endpoint": "https://graph.example/users/1/groups"}},
        },
        {"hasgroups": True},
    ],
    ids=["names", "hasgroups"],
)
async def test_groups_that_do_not_fit_into_a_token_are_reported(
    provider_server: ScriptedProvider, claims: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Entra leaves out more than 200 groups. The user then has the rights of no group."""
    token = provider_server.sign(provider_server.claims(**claims))
    assert (await client(provider_server).check(token)).person.groups == frozenset()
    assert "left out the groups" in caplog.text


def test_google_is_named_with_and_without_its_scheme() -> None:
    assert _issuers("https://accounts.google.com") == [
        "https://accounts.google.com",
        "accounts.google.com",
    ]
    assert _issuers("https://login.example.org") == ["https://login.example.org"]
