"""The keys that were made here. They are kept in the store, and once more in a file beside the
database, DATA_DIR/keys.json.

Both have digests only. Both have the same keys; where the file has keys and the database has none,
the database was lost or set back, and takes the keys of the file. So a gateway with keys does not
open to everybody when its database is damaged. Where the file cannot be read either, only the keys
of the settings are good.

A key can always be revoked, though the disk is full: at once in memory, then in the file by zeros
over its digest, which need no new room, and then in the database and the file as a whole, which is
tried again until it is done. A key with a struck digest in the file is revoked, whatever the
database says.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gateway.domain import Value
from gateway.domain.grant import Grant
from gateway.errors import Conflict, NotFound, StoreError
from gateway.keys import FROM_SETTINGS, digest_of, new_key
from gateway.logging import Logger
from gateway.proxy.access.auth import Keys, key_of
from gateway.store import atomic_file
from gateway.store.store import Store

log = Logger("fitserve.keys")


class StoredKey(Value):
    """A stored key: its grant, and its digest in hexadecimal digits."""

    grant: Grant
    digest: str
    created_at: float

    @property
    def struck(self) -> bool:
        return self.digest == _STRUCK


_STRUCK = "0" * 64
_RETRY_S = 5.0
_STORED_KEYS: TypeAdapter[tuple[StoredKey, ...]] = TypeAdapter(tuple[StoredKey, ...])


class Keyring:
    """Blocks for the time of a disk write, and may be called from any thread. `changed` is called
    when others are in force."""

    def __init__(self, store: Store, data: Path, keys: Keys, changed: Callable[[], object]) -> None:
        self.kept: tuple[StoredKey, ...] = ()
        self._store = store
        self._file = data / "keys.json"
        self._keys = keys
        self._changed = changed
        self._lock = threading.Lock()
        self._revoked: dict[str, StoredKey] = {}
        """Keys that are good for nothing any more, and that the database or the file still has."""
        self._timer: threading.Timer | None = None

    def load(self) -> None:
        """Makes the stored keys good."""
        stored = tuple(
            StoredKey(grant=grant, digest=digest.hex(), created_at=at)
            for grant, digest, at in self._store.grants()
        )
        in_file: tuple[StoredKey, ...] = ()
        closed = False
        try:
            in_file = (
                _STORED_KEYS.validate_json(self._file.read_bytes()) if self._file.exists() else ()
            )
        except (OSError, ValidationError) as error:
            if not stored:
                log.error(  # noqa: TRY400
                    "the keys cannot be read, so nobody is let in without one of the settings",
                    error=str(error)[:300],
                )
                closed = True
        struck = {(one.grant.name, one.created_at) for one in in_file if one.struck}
        kept = tuple(one for one in stored if (one.grant.name, one.created_at) not in struck)
        if not stored:
            kept = tuple(one for one in in_file if not one.struck)
            if kept:
                log.warning(
                    "the database knew no keys, those of the file beside it are in force",
                    keys=len(kept),
                )
                if self._store.problem is None:
                    for one in kept:
                        self._store.add_key(one.grant, bytes.fromhex(one.digest), one.created_at)
        self._swap(kept, closed=closed)
        if stored and kept != in_file:
            self._revoked = {
                one.grant.name: one.evolve(digest=_STRUCK)
                for one in stored
                if (one.grant.name, one.created_at) in struck
            }
            self._settle()

    def add(self, grant: Grant) -> str:
        """The new key, in clear for the only time. Raises Conflict, StoreError."""
        self._store.changeable()
        with self._lock:
            if self._revoked and not self._settle():
                raise StoreError(
                    "A key that was revoked is not out of the database yet. Nothing was changed.",
                    hint="Free disk space or repair the permissions of FITSERVE_DATA_DIR.",
                )
            if grant.name in FROM_SETTINGS or any(
                one.grant.name == grant.name for one in self.kept
            ):
                raise Conflict(
                    f"There is a key {grant.name} already.",
                    hint="Remove it first, or use another name.",
                )
            if "admin" not in grant.scopes and "admin" not in self._keys.table.scopes:
                raise Conflict(
                    "The first key must have the scope admin: without one nobody could make or"
                    " remove keys any more.",
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

    def remove(self, name: str) -> bool:
        """From now on the key is good for nothing; its requests under way are finished. Whether
        that is on the disk too: where not, it is tried
        again, and a gateway that starts before it has succeeded knows the key. Raises NotFound,
        Conflict.
        """
        with self._lock:
            if name in FROM_SETTINGS:
                raise Conflict(
                    f"The key {name} comes from the settings.",
                    hint=f"Unset FITSERVE_{name.upper()}_KEY and restart.",
                )
            kept = tuple(one for one in self.kept if one.grant.name != name)
            if len(kept) == len(self.kept):
                raise NotFound(
                    f"There is no key {name[:200]}.", hint="`fitserve keys ls` lists them."
                )
            left = {
                *(scope for one in kept for scope in one.grant.scopes),
                *self._keys.fixed_scopes,
            }
            if left and "admin" not in left:
                raise Conflict(
                    "This is the last key with the scope admin: without one nobody could make or"
                    " remove keys any more.",
                    hint="Remove the other keys first, or make another one for admin.",
                )
            gone = next(one for one in self.kept if one.grant.name == name)
            self._swap(kept)
            self._revoked[name] = gone
            struck = self._strike(gone)
            durable = self._settle() or struck
        if durable:
            log.info("key removed", key=name)
        else:
            log.warning(
                "key removed, but the disk does not take it; a restart would bring the key back"
                " until it does",
                key=name,
            )
        return durable

    def close(self) -> None:
        """Tries nothing again."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()

    def _strike(self, key: StoredKey) -> bool:
        """Zeros over the digest in the file: a full disk has room for that. Whether they are on the
        disk."""
        if key.struck:
            return True
        try:
            with self._file.open("r+b") as file:
                at = file.read().find(key.digest.encode())
                if at < 0:
                    return False
                file.seek(at)
                file.write(_STRUCK.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            return False
        self._revoked[key.grant.name] = key.evolve(digest=_STRUCK)
        return True

    def _settle(self) -> bool:
        """Takes revoked keys out of the database, and then out of the file. Whether nothing is left
        to do; else it is tried again later."""
        if self._store.problem is None:
            with contextlib.suppress(StoreError):
                for name in self._revoked:
                    with contextlib.suppress(NotFound):
                        self._store.remove_key(name)
                self._write(self.kept)
                self._revoked.clear()
                return True
        # The database is another one, in memory, until the next start: the struck digest must stay
        # in the file until then.
        elif not [key for key in list(self._revoked.values()) if not self._strike(key)]:
            self._revoked.clear()
            return True
        if self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(_RETRY_S, self._try_again)
            self._timer.daemon = True
            self._timer.start()
        return False

    def _try_again(self) -> None:
        with self._lock:
            self._timer = None
            names = list(self._revoked)
            if names and self._settle():
                log.info("revoked keys are out of the database now", keys=names)

    def _swap(self, kept: tuple[StoredKey, ...], *, closed: bool = False) -> None:
        self.kept = kept
        self._keys.swap(
            [key_of(one.grant, bytes.fromhex(one.digest)) for one in kept], closed=closed
        )
        self._changed()

    def _write(self, kept: tuple[StoredKey, ...]) -> None:
        try:
            atomic_file.write(self._file, _STORED_KEYS.dump_json(kept))
        except OSError as error:
            raise StoreError(
                f"{self._file} cannot be written: {error.strerror}. Nothing was changed.",
                hint="Free disk space or repair the permissions of FITSERVE_DATA_DIR.",
            ) from None
