"""Owners of files: created keys by their digest, keys of the settings by their name."""

from __future__ import annotations

import pytest

from gateway.domain.grant import Grant
from gateway.errors import Forbidden
from gateway.keys import hash_key, new_key
from gateway.proxy.access.auth import ANONYMOUS_KEY, Keys, build_key
from gateway.secret import Secret
from gateway.server.batches.owner import key_of_owner, owner_of

GRANT = Grant(name="app")


def test_a_later_key_of_the_same_name_is_another_owner() -> None:
    former_key, later_key = (build_key(GRANT, hash_key(new_key())) for _ in range(2))
    assert owner_of(former_key) != owner_of(later_key)
    keys = Keys(None, None, [later_key])
    assert key_of_owner(owner_of(later_key), keys) == later_key
    assert key_of_owner(owner_of(former_key), keys) is None


def test_a_key_of_the_settings_may_change() -> None:
    keys, later_keys = (Keys(None, Secret(text)) for text in ("the-first-key", "the-later-key"))
    (key,) = keys.table.keys.values()
    (later_key,) = later_keys.table.keys.values()
    assert owner_of(key) == owner_of(later_key)
    assert key_of_owner(owner_of(key), later_keys) == later_key


def test_a_gateway_without_keys_has_one_owner_until_a_key_is_made() -> None:
    keys = Keys(None, None)
    owner = owner_of(ANONYMOUS_KEY)
    assert key_of_owner(owner, keys) is ANONYMOUS_KEY
    keys.swap([build_key(GRANT, hash_key(new_key()))])
    assert key_of_owner(owner, keys) is None


def test_a_token_is_the_owner_that_its_key_is() -> None:
    key = build_key(GRANT, hash_key(new_key()))
    keys = Keys(None, None, [key])
    token = keys.issue_token(key)
    assert owner_of(keys.check(b"Bearer " + token.reveal_bytes(), "inference")) == owner_of(key)
    assert key_of_owner(owner_of(key), keys) == key


def test_a_key_that_may_not_ask_models_owns_nothing() -> None:
    key = build_key(Grant(name="app", scopes=("read",)), hash_key(new_key()))
    assert key_of_owner(owner_of(key), Keys(None, None, [key])) is None


def test_the_key_of_a_page_owns_nothing() -> None:
    keys = Keys(None, None, person_scopes=frozenset(("inference",)))
    token = keys.open_session("user:ann", frozenset(("inference",)), 1e12)
    key = keys.check(b"Bearer " + token.reveal_bytes(), "inference")
    with pytest.raises(Forbidden, match="belong to keys"):
        owner_of(key)
