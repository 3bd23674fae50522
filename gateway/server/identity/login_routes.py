"""Routes of the login: begin and end it, and exchange an identity for the key of a page."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from pydantic import Field

from gateway.domain import Value
from gateway.errors import (
    BadRequest,
    FitserveError,
    Forbidden,
    NotFound,
    NotReady,
    Unauthorized,
)
from gateway.keys import Scope
from gateway.proxy.api.error_bodies import errors
from gateway.secret import Secret
from gateway.server.gateway_parts import gateway_of
from gateway.server.identity.identities import Identities
from gateway.server.identity.login_attempts import LOGIN_S

router = APIRouter(prefix="/auth", tags=["login"])

_NO_STORE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
# RFC 6749, section 4.1.2.1: the codes of errors.
_ERROR_CODE = re.compile(r"[a-z_]{1,64}")
_MAX_CHARACTERS = 8192
_Text = Annotated[str, Query(max_length=_MAX_CHARACTERS)]


class LoginWays(Value):
    """Ways to sign in."""

    proxy: bool = Field(description="whether a proxy names users")
    login: bool = Field(description="whether GET /auth/login leads to a provider")


class TokenView(Value):
    """The key of a page."""

    key: str
    name: str = Field(description="name of the user")
    scopes: tuple[Scope, ...]
    ends_at: float = Field(description="time of its end, in Unix seconds")
    can_sign_out: bool


class SignOutView(Value):
    url: str | None = Field(description="address at which the provider ends its own session")


@router.get("/ways")
async def show_ways(request: Request) -> LoginWays:
    """The ways to sign in, without a key."""
    identities = gateway_of(request).serving.identities
    return LoginWays(
        proxy=identities is not None and identities.proxy is not None,
        login=identities is not None and identities.provider is not None,
    )


@router.get("/login", include_in_schema=False)
async def start_login(request: Request) -> Response:
    """Lead the browser to the provider."""
    identities = _identities(request)
    if identities.provider is None:
        raise _no_login_error()
    attempt, cookie = identities.attempts.create()
    url = await identities.provider.login_url(attempt)
    answer = RedirectResponse(url, 302, headers=_NO_STORE)
    # Lax, as the provider leads back here from its own page.
    _set_cookie(answer, request, _login_cookie(request), cookie, LOGIN_S, is_strict=False)
    return answer


@router.get("/callback", include_in_schema=False)
async def finish_login(
    request: Request,
    state: _Text = "",
    code: _Text = "",
    iss: _Text | None = None,
    error: _Text = "",
) -> Response:
    """Open the session of a person that the provider has signed in."""
    identities = _identities(request)
    if identities.provider is None:
        raise _no_login_error()
    name = _login_cookie(request)
    try:
        attempt = identities.attempts.pop(state, request.cookies.get(name, ""))
        if error:
            reason = error if _ERROR_CODE.fullmatch(error) else "an unknown reason"
            raise Forbidden(f"The provider refused the login: {reason}.", hint="Sign in once more.")
        if not code:
            raise BadRequest("The provider sent no code.", hint="Sign in once more.")
        signed_person = await identities.provider.sign_in(code, iss, attempt)
        cookie, session_s = identities.open_session(
            signed_person.person, signed_person.token, signed_person.ends_at
        )
    except FitserveError as problem:
        # A person reads this answer.
        return PlainTextResponse(str(problem), problem.status, headers=_NO_STORE)
    answer = RedirectResponse("/", 303, headers=_NO_STORE)
    answer.delete_cookie(name, path="/", secure=_is_secure(request), httponly=True)
    _set_cookie(answer, request, _session_cookie(request), cookie, session_s, is_strict=True)
    return answer


@router.post(
    "/token",
    response_model=TokenView,
    responses=errors(Unauthorized, Forbidden, BadRequest, NotFound),
)
async def make_token(request: Request) -> Response:
    """A key of an hour for the page, from the session or from the header of a trusted proxy."""
    identities = _identities(request)
    token = await identities.page_token(
        request.scope["headers"],
        _connection_address(request),
        request.cookies.get(_session_cookie(request)),
    )
    view = TokenView(
        key=token.key.reveal(),
        name=token.name,
        scopes=tuple(sorted(token.scopes)),
        ends_at=token.ends_at,
        can_sign_out=token.can_end,
    )
    return JSONResponse(view.model_dump(), headers=_NO_STORE)


@router.post("/logout", response_model=SignOutView, responses=errors(Forbidden, NotFound, NotReady))
async def sign_out(request: Request) -> Response:
    """End the session of this browser, and every key that came from it."""
    identities = _identities(request)
    identities.check_page(request.scope["headers"], _connection_address(request))
    name = _session_cookie(request)
    session = identities.close_session(request.cookies.get(name, ""))
    url = None
    if session is not None and identities.provider is not None:
        url = await identities.provider.logout_url(session.id_token)
    answer = JSONResponse({"url": url}, headers=_NO_STORE)
    answer.delete_cookie(name, path="/", secure=_is_secure(request), httponly=True)
    return answer


def _connection_address(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _identities(request: Request) -> Identities:
    """The identities of the gateway. Raises NotFound without any."""
    identities = gateway_of(request).serving.identities
    if identities is None:
        raise _no_login_error()
    return identities


def _no_login_error() -> NotFound:
    return NotFound(
        "This gateway has no login.", hint="Use a key. docs/security.md describes the logins."
    )


def _is_secure(request: Request) -> bool:
    """Whether browsers reach the gateway by https."""
    return gateway_of(request).serving.settings.oidc_url.startswith("https://")


def _login_cookie(request: Request) -> str:
    # A browser takes a cookie of this name only from this very host, and with `Secure`.
    return "__Host-fitserve-login" if _is_secure(request) else "fitserve-login"


def _session_cookie(request: Request) -> str:
    return "__Host-fitserve-session" if _is_secure(request) else "fitserve-session"


def _set_cookie(
    answer: Response,
    request: Request,
    name: str,
    value: Secret,
    life_s: float,
    *,
    is_strict: bool,
) -> None:
    answer.set_cookie(
        name,
        value.reveal(),
        max_age=int(life_s),
        path="/",
        secure=_is_secure(request),
        httponly=True,
        samesite="strict" if is_strict else "lax",
    )
