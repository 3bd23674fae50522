"""Owners of files and batches: the keys that made them."""

from __future__ import annotations

from gateway.errors import Forbidden
from gateway.keys import SETTINGS_KEYS
from gateway.proxy.access.auth import ANONYMOUS_KEY, Key, Keys

_OPEN_GATEWAY = "open"
_SETTINGS = "settings:"


def owner_of(key: Key) -> str:
    """The name of an owner on the disk. A created key is its digest, so that a later key of the
    same name is another owner; a key of the settings may change. Raises Forbidden for a person,
    whose page has another key each hour, so that no quota would hold."""
    if key is ANONYMOUS_KEY:
        return _OPEN_GATEWAY
    if key.is_of_person:
        raise Forbidden(
            "Files and batches belong to keys, and the key of a page has only an hour.",
            hint="Send a key that the operator has created: `fitserve keys add NAME`.",
        )
    return f"{_SETTINGS}{key.name}" if key.name in SETTINGS_KEYS else key.account.hex()


def key_of_owner(owner: str, keys: Keys) -> Key | None:
    """The valid key of an owner, if it may still send requests."""
    if owner == _OPEN_GATEWAY:
        return ANONYMOUS_KEY if keys.is_open else None
    key = (
        keys.fixed_key(owner.removeprefix(_SETTINGS))
        if owner.startswith(_SETTINGS)
        else keys.table.keys.get(bytes.fromhex(owner))
    )
    return key if key is not None and keys.allows(key, "inference") else None
