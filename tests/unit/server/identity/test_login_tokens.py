"""ID tokens of logins, which are no bearer tokens."""

from __future__ import annotations

from unittest import mock

import pytest

from gateway.errors import Unauthorized
from gateway.secret import Secret
from gateway.server.identity.login_tokens import LoginTokens

MODULE = "gateway.server.identity.login_tokens"


def test_the_token_of_a_login_is_refused_with_any_form_of_its_signature() -> None:
    tokens = LoginTokens()
    tokens.add(Secret("eyJ.eyJ.c2ln"), 1e12)
    for token in ("eyJ.eyJ.c2ln", "eyJ.eyJ.c2lo", "eyJ.eyJ.c2ln="):
        with pytest.raises(Unauthorized, match="login"):
            tokens.check(token)
    tokens.check("eyJ.eyI.c2ln")


def test_a_token_that_has_ended_leaves_the_memory() -> None:
    tokens = LoginTokens()
    for now in (100.0, 200.0):
        with mock.patch(f"{MODULE}.time.time", return_value=now):
            tokens.add(Secret(f"eyJ.{now}.c2ln"), now + 60)
    assert len(tokens._ends) == 1
    with pytest.raises(Unauthorized):
        tokens.check("eyJ.200.0.c2ln")


def test_the_oldest_tokens_make_room() -> None:
    tokens = LoginTokens()
    with mock.patch(f"{MODULE}._MAX_TOKENS", 2):
        for name in "abc":
            tokens.add(Secret(f"eyJ.{name}.c2ln"), 1e12)
    tokens.check("eyJ.a.c2ln")
    for name in "bc":
        with pytest.raises(Unauthorized):
            tokens.check(f"eyJ.{name}.c2ln")
