"""Owners of files and batches: the keys that made them."""

from __future__ import annotations

from gateway.keys import SETTINGS_KEYS
from gateway.proxy.access.auth import ANONYMOUS_KEY, Key, Keys

_OPEN_GATEWAY = "open"
_SETTINGS = "settings:"


def owner_of(key: Key) -> str:
    """The name of an owner on the disk. A created key is its digest, so that a later key of the
    same name is another owner; a key of the settings may change."""
    if key is ANONYMOUS_KEY:
        return _OPEN_GATEWAY
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
