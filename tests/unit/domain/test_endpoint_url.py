"""Endpoints are stored in one form that can be asked, or refused with a sentence."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.endpoint_url import endpoint_url

GOOD = {
    "http://127.0.0.1:9200/v1": "http://127.0.0.1:9200/v1",
    "http://127.0.0.1:9200": "http://127.0.0.1:9200/v1",
    "HTTP://Engine.Example:80/v1/": "http://engine.example/v1",
    "https://engine:443//": "https://engine/v1",
    "https://engine_1:8443/a/b%20c/v1": "https://engine_1:8443/a/b%20c/v1",
    "http://[0:0::1]:8000/v1": "http://[::1]:8000/v1",
}
BAD = {
    "a tab": "http://h/a\tb/v1",
    "a blank": "http://h/a b/v1",
    "a blank around": " http://h/v1",
    "an end of line": "http://h/v1\r\nx: y",
    "a control character": "http://h/\x01",
    "a lone surrogate": "http://h/\ud800",
    "other scripts": "http://\u0435ngine/v1",
    "nothing": "",
    "no scheme": "h:8000/v1",
    "another scheme": "file:///etc/passwd",
    "no host": "http:///v1",
    "an empty label": "http://a..b/v1",
    "no number as port": "http://h:x/v1",
    "a port too high": "http://h:65536/v1",
    "port 0": "http://h:0/v1",
    "half an IPv6 address": "http://[::1/v1",
    "an interface": "http://[fe80::1%25eth0]/v1",
    "a user": "http://me@h/v1",
    "a query": "http://h/v1?",
    "a fragment": "http://h/v1#",
    "a backslash": "http://h\\x/v1",
    "an empty segment": "http://h//v1",
    "a way up": "http://h/../v1",
    "a hidden way up": "http://h/.%2E/v1",
    "half an escape": "http://h/%2/v1",
}


@pytest.mark.parametrize(("raw_url", "stored"), GOOD.items())
def test_an_endpoint_has_one_form(raw_url: str, stored: str) -> None:
    assert endpoint_url(raw_url) == stored
    assert endpoint_url(stored) == stored


@pytest.mark.parametrize("case", BAD)
def test_an_impossible_address_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match=r"\.$") as error:
        endpoint_url(BAD[case])
    assert str(error.value).isascii()
    assert str(error.value).isprintable()


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="user, password") as error:
        endpoint_url("http://me:secret@h/v1")
    assert "secret" not in str(error.value)


@given(
    st.text()
    | st.text(alphabet="htps:/@[]%.\\?#v1 \tab0-\x00\ud800", min_size=8).map("http://".__add__)
)
def test_a_stored_address_is_plain(text: str) -> None:
    try:
        address = endpoint_url(text)
    except ValueError:
        return
    parts = urlsplit(address)
    assert endpoint_url(address) == address
    assert parts.scheme in ("http", "https")
    assert parts.hostname
    assert address.isascii()
    assert address.isprintable()
    assert " " not in address
    assert "@" not in parts.netloc
    assert address.endswith("/v1")
