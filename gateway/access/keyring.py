"""The keys that were made here. They are kept in the store, and once more in a file beside the database, DATA_DIR/keys.json.

Both have digests only. Both have the same keys; where the file has keys and the database has none, the database was lost or set back, and
takes the keys of the file. So a gateway with keys does not open to everybody when its database is damaged. Where the file cannot be read
either, only the keys of the settings are good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from gateway.access.auth import Keys, key_of
from gateway.domain import Value
from gateway.domain.key import FROM_SETTINGS, Grant, digest_of, new_key
from gateway.errors import Conflict, NotFound, StoreError
from gateway.store import atomic_file
from gateway.store.store import Store

log = structlog.get_logger("fitserve.keys")


class StoredKey(Value):
    """A stored key: its grant, and its digest in hexadecimal digits."""

    grant: Grant
    digest: str
    created_at: float


_STORED_KEYS: TypeAdapter[tuple[StoredKey, ...]] = TypeAdapter(tuple[StoredKey, ...])


class Keyring:
    """Blocks for the time of a disk write, and may be called from any thread. `changed` is called when others are in force."""

    def __init__(self, store: Store, data: Path, keys: Keys, changed: Callable[[], object]) -> None:
        self.kept: tuple[StoredKey, ...] = ()
        self._store = store
        self._file = data / "keys.json"
        self._keys = keys
        self._changed = changed
        self._lock = threading.Lock()

    def load(self) -> None:
        """Makes the stored keys good."""
        kept = tuple(StoredKey(grant=grant, digest=digest.hex(), created_at=at) for grant, digest, at in self._store.grants())
        closed = False
        if not kept:
            try:
                kept = _STORED_KEYS.validate_json(self._file.read_bytes()) if self._file.exists() else ()
            except (OSError, ValidationError) as error:
                log.error("the keys cannot be read, so nobody is let in without one of the settings", error=str(error)[:300])  # noqa: TRY400
                closed = True
            if kept:
                log.warning("the database knew no keys, those of the file beside it are in force", keys=len(kept))
                if self._store.problem is None:
                    for one in kept:
                        self._store.add_key(one.grant, bytes.fromhex(one.digest), one.created_at)
        elif self._store.problem is None:
            self._write(kept)
        self._swap(kept, closed=closed)

    def add(self, grant: Grant) -> str:
        """The new key, in clear for the only time. Raises Conflict, StoreError."""
        self._store.changeable()
        with self._lock:
            if grant.name in FROM_SETTINGS or any(one.grant.name == grant.name for one in self.kept):
                raise Conflict(f"There is a key {grant.name} already.", hint="Remove it first, or use another name.")
            if "admin" not in grant.scopes and "admin" not in self._keys.table.scopes:
                raise Conflict(
                    "The first key must have the scope admin: without one nobody could make or remove keys any more.",
                    hint="Make that one first, or set FITSERVE_ADMIN_KEY.",
                )
            key = new_key()
            one = StoredKey(grant=grant, digest=digest_of(key).hex(), created_at=time.time())
            kept = (*self.kept, one)
            self._write(kept)
            self._store.add_key(grant, bytes.fromhex(one.digest), one.created_at)
            self._swap(kept)
        log.info("key made", key=grant.name, scopes=grant.scopes)
        return key

    def remove(self, name: str) -> None:
        """From now on the key is good for nothing; its requests under way are finished. Raises NotFound, Conflict, StoreError."""
        self._store.changeable()
        with self._lock:
            if name in FROM_SETTINGS:
                raise Conflict(
                    f"The key {name} comes from the settings.", hint=f"Unset FITSERVE_{name.upper()}_KEY and restart."
                )
            kept = tuple(one for one in self.kept if one.grant.name != name)
            if len(kept) == len(self.kept):
                raise NotFound(f"There is no key {name[:200]}.", hint="`fitserve keys ls` lists them.")
            left = {*(scope for one in kept for scope in one.grant.scopes), *self._keys.fixed_scopes}
            if left and "admin" not in left:
                raise Conflict(
                    "This is the last key with the scope admin: without one nobody could make or remove keys any more.",
                    hint="Remove the other keys first, or make another one for admin.",
                )
            self._write(kept)
            self._store.remove_key(name)
            self._swap(kept)
        log.info("key removed", key=name)

    def _swap(self, kept: tuple[StoredKey, ...], *, closed: bool = False) -> None:
        self.kept = kept
        self._keys.swap([key_of(one.grant, bytes.fromhex(one.digest)) for one in kept], closed=closed)
        self._changed()

    def _write(self, kept: tuple[StoredKey, ...]) -> None:
        try:
            atomic_file.write(self._file, _STORED_KEYS.dump_json(kept))
        except OSError as error:
            raise StoreError(
                f"{self._file} cannot be written: {error.strerror}. Nothing was changed.",
                hint="Free disk space or repair the permissions of FITSERVE_DATA_DIR.",
            ) from None
