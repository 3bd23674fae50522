"""Sessions of people that signed in."""

from __future__ import annotations

from unittest import mock

from gateway.secret import Secret
from gateway.server.identity.person import Person
from gateway.server.identity.sessions import Session, Sessions

MODULE = "gateway.server.identity.sessions"


def session(ends_at: float = 1e12) -> Session:
    return Session(Person("ann"), frozenset({"read"}), ends_at, Secret("an-id-token"))


def test_a_session_is_found_by_its_cookie_until_it_is_closed() -> None:
    sessions, ann = Sessions(), session()
    cookie = sessions.open(ann).reveal()
    assert sessions.find(cookie) is ann
    assert sessions.find(f"{cookie}x") is None
    assert sessions.close(cookie) is ann
    assert sessions.close(cookie) is None
    assert sessions.find(cookie) is None


def test_a_session_ends_by_the_clock() -> None:
    sessions = Sessions()
    cookie = sessions.open(session(ends_at=100.0)).reveal()
    with mock.patch(f"{MODULE}.time.time", return_value=99.0):
        assert sessions.find(cookie) is not None
    with mock.patch(f"{MODULE}.time.time", return_value=100.0):
        assert sessions.find(cookie) is None


def test_the_oldest_sessions_make_room() -> None:
    sessions = Sessions()
    with mock.patch(f"{MODULE}._MAX_SESSIONS", 2):
        cookies = [sessions.open(session()).reveal() for _ in range(3)]
    assert [sessions.find(cookie) is not None for cookie in cookies] == [False, True, True]
