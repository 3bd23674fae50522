"""The web pages that may call, and the answers to their browsers."""

from __future__ import annotations

import pytest

from gateway.errors import Forbidden
from gateway.proxy.access.auth import Keys
from gateway.proxy.access.origins import Origins

APP, OTHER = b"https://app.example", b"https://evil.example"
HOST = {b"host": b"127.0.0.1:8080"}


def test_a_named_origin_alone_is_allowed() -> None:
    origins = Origins(frozenset({APP.decode()}))
    headers = dict(origins.headers(APP))
    assert (headers[b"access-control-allow-origin"], headers[b"vary"]) == (APP, b"origin")
    assert b"access-control-allow-credentials" not in headers
    assert origins.headers(OTHER) == origins.headers(None) == []
    assert b"access-control-allow-origin: https://app.example\r\n" in origins.lines(APP)


def test_all_is_said_only_where_all_are_named() -> None:
    all_origins = Origins(frozenset({"*"}))
    assert dict(all_origins.headers(OTHER))[b"access-control-allow-origin"] == b"*"
    assert all_origins.headers(None) == []
    assert not all_origins.names(OTHER)
    assert Origins().headers(APP) == []


def test_a_named_page_may_call_without_keys_and_all_pages_may_only_ask_models() -> None:
    keys_for_app, keys_for_all = (
        Keys(None, None, origins=Origins(frozenset({origin}))) for origin in (APP.decode(), "*")
    )
    for need in ("inference", "admin"):
        keys_for_app.authenticate({**HOST, b"origin": APP}, need, "")
        with pytest.raises(Forbidden, match="FITSERVE_ORIGINS"):
            keys_for_app.authenticate({**HOST, b"origin": OTHER}, need, "")
    keys_for_all.authenticate({**HOST, b"origin": OTHER}, "inference", "")
    with pytest.raises(Forbidden):
        keys_for_all.authenticate({**HOST, b"origin": OTHER}, "admin", "")
    with pytest.raises(Forbidden, match="Host"):
        keys_for_app.authenticate({b"host": b"evil.example", b"origin": APP}, "inference", "")
