"""Settings of identities, and the libraries that they load."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from gateway.errors import SettingsError
from gateway.proxy.access.auth import Keys
from gateway.server.identity.identities import build_identities, person_scopes
from gateway.settings import Settings

OIDC: dict[str, Any] = {
    "oidc_issuer": "https://login.example",
    "oidc_client_id": "fitserve",
    "oidc_url": "https://gw.example",
    "roles": "admin=ann",
}


def test_openid_connect_without_its_library_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "gateway.server.identity.oidc_provider", raising=False)
    names = [name for name in sys.modules if name.startswith("authlib.")]
    for name in ("authlib", *names):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError, match=r"'\.\[oidc\]'"):
        build_identities(Settings(**OIDC), Keys(None, None))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"oidc_url": ""}, "FITSERVE_OIDC_URL"),
        ({"oidc_client_id": ""}, "FITSERVE_OIDC_CLIENT_ID"),
        ({"roles": {}}, "FITSERVE_ROLES"),
        ({"roles": {"admin": ()}}, "FITSERVE_ROLES"),
    ],
    ids=str,
)
def test_half_of_the_settings_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        build_identities(Settings(**OIDC | changes), Keys(None, None))


@pytest.mark.parametrize("name", ["oidc_issuer", "oidc_url"])
@pytest.mark.parametrize("url", ["http://login.example", "https://"])
def test_an_address_without_https_is_refused(name: str, url: str) -> None:
    pytest.importorskip("authlib", reason="needs the extra packages oidc")
    with pytest.raises(SettingsError, match=f"FITSERVE_{name.upper()}"):
        build_identities(Settings(**OIDC | {name: url}), Keys(None, None))


@pytest.mark.parametrize("name", ["oidc_issuer", "oidc_url"])
@pytest.mark.parametrize("url", ["login.example", "ftp://x", "https://me:word@login.example"])
def test_an_address_with_a_user_or_without_a_scheme_is_refused(name: str, url: str) -> None:
    with pytest.raises(ValueError, match="without a user"):
        Settings(**OIDC | {name: url})


def test_a_gateway_without_people_loads_no_library() -> None:
    code = (
        "import sys, gateway.server.app;"
        "print([name for name in ('authlib', 'joserfc', 'cryptography') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_worker_loads_nothing_of_identities() -> None:
    code = (
        "import sys, gateway.proxy.workers.worker;"
        "print([name for name in sys.modules if 'identity' in name or 'authlib' in name])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_roles_are_read_from_words_and_from_lists() -> None:
    words = Settings(roles="admin='group:Domain Admins',ann read=* admin=bob")
    assert words.roles == {"admin": ("group:Domain Admins", "ann", "bob"), "read": ("*",)}
    assert Settings(roles={"admin": ["ann"]}).roles == {"admin": ("ann",)}


def test_people_count_only_with_a_way_to_name_them() -> None:
    assert person_scopes(Settings(roles="admin=ann")) is None
    assert person_scopes(Settings(**OIDC)) == frozenset(("admin",))
