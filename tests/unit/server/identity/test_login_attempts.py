"""Logins under way: each once, in one browser, for ten minutes."""

from __future__ import annotations

from unittest import mock

import pytest

from gateway.errors import BadRequest
from gateway.server.identity import login_attempts
from gateway.server.identity.login_attempts import LOGIN_S, LoginAttempts

MODULE = "gateway.server.identity.login_attempts"


def test_an_attempt_is_taken_once() -> None:
    attempts = LoginAttempts()
    attempt, cookie = attempts.create()
    assert attempts.pop(attempt.state.reveal(), cookie.reveal()) == attempt
    with pytest.raises(BadRequest, match="not begun in this browser"):
        attempts.pop(attempt.state.reveal(), cookie.reveal())


def test_another_browser_cannot_end_an_attempt_nor_can_its_guess_be_repeated() -> None:
    attempts = LoginAttempts()
    attempt, cookie = attempts.create()
    _, other_cookie = attempts.create()
    for wrong_cookie in (other_cookie.reveal(), "", cookie.reveal()):
        with pytest.raises(BadRequest):
            attempts.pop(attempt.state.reveal(), wrong_cookie)


def test_an_attempt_ends() -> None:
    attempts = LoginAttempts()
    with mock.patch(f"{MODULE}.time.monotonic", return_value=100.0):
        attempt, cookie = attempts.create()
    with (
        mock.patch(f"{MODULE}.time.monotonic", return_value=100.0 + LOGIN_S),
        pytest.raises(BadRequest),
    ):
        attempts.pop(attempt.state.reveal(), cookie.reveal())


def test_the_oldest_attempts_make_room() -> None:
    attempts = LoginAttempts()
    with mock.patch.object(login_attempts, "_MAX_LOGINS", 3):
        logins = [attempts.create() for _ in range(4)]
    with pytest.raises(BadRequest):
        attempts.pop(logins[0][0].state.reveal(), logins[0][1].reveal())
    for attempt, cookie in logins[1:]:
        assert attempts.pop(attempt.state.reveal(), cookie.reveal()) == attempt


def test_attempts_that_have_ended_leave_the_memory() -> None:
    attempts = LoginAttempts()
    for now in (100.0, 101.0, 100.0 + LOGIN_S):
        with mock.patch(f"{MODULE}.time.monotonic", return_value=now):
            attempts.create()
    assert [attempt.ends_at - LOGIN_S for attempt in attempts._attempts.values()] == [
        101.0,
        100.0 + LOGIN_S,
    ]


def test_no_secret_of_an_attempt_is_shown() -> None:
    attempt, cookie = LoginAttempts().create()
    output = f"{attempt!r} {cookie!r}"
    for secret in (attempt.state, attempt.nonce, attempt.verifier, cookie):
        assert secret.reveal() not in output
