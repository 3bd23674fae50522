"""Created keys, kept in the store and in a file next to the database, DATA_DIR/keys.json.

Both hold the digests of the same keys. A database without keys was lost or reset, so it takes the
keys of the file: a damaged database does not open the gateway. If the file is unreadable too, only
the keys of the settings are valid.

A key can be revoked on a full disk: immediately in memory, then in the file by zeros over its
digest, which need no space. The database and the whole file follow, retried until they succeed. A
key with a struck digest in the file is revoked, even if the database has it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gateway.disk_fault import unwritten_error
from gateway.domain import Value
from gateway.domain.grant import Allowance, Grant
from gateway.errors import BadRequest, Conflict, NotFound, StoreError
from gateway.keys import PERSON_PREFIX, SETTINGS_KEYS, Scope, hash_key, new_key
from gateway.logging import Logger
from gateway.proxy.access.auth import Key, Keys, build_key
from gateway.proxy.access.budget_book import BudgetBook, BudgetUse
from gateway.proxy.access.budgets import PERSON_OWNER, KeyBudget
from gateway.secret import Secret
from gateway.store import atomic_file
from gateway.store.store import Store

log = Logger("fitserve.keys")


class StoredKey(Value):
    """A stored key: its grant, and its digest in hexadecimal digits."""

    grant: Grant
    digest: str
    created_at: float

    @property
    def is_struck(self) -> bool:
        return self.digest == _REVOKED_DIGEST


_REVOKED_DIGEST = "0" * 64
_RETRY_S = 5.0
# The clock may be set, so the next end of a key is computed again after this time.
_CLOCK_LOOK_S = 3600.0
# People whose groups are known. More than have page keys at a time.
_MAX_PEOPLE = 8192
_STORED_KEYS: TypeAdapter[tuple[StoredKey, ...]] = TypeAdapter(tuple[StoredKey, ...])


class Keyring:
    """Blocks for the time of a disk write, and may be called from any thread. `on_change` is called
    after each change of the valid keys."""

    def __init__(
        self,
        store: Store,
        data: Path,
        keys: Keys,
        on_change: Callable[[], object],
        book: BudgetBook,
    ) -> None:
        self.stored_keys: tuple[StoredKey, ...] = ()
        self._store = store
        self._file = data / "keys.json"
        self._keys = keys
        self._on_change = on_change
        self._book = book
        self._lock = threading.Lock()
        self._revoked: dict[str, StoredKey] = {}
        """Revoked keys that the database or the file still has."""
        self._callers: dict[int, tuple[StoredKey, Key]] = {}
        """The valid keys by the `id` of their stored form, which each entry keeps alive."""
        self._people: dict[str, frozenset[str]] = {}
        """The groups of people, by the names in lists, as their identities named them last."""
        book.set_rows_in_use(self._rows_in_use)
        self._timer: threading.Timer | None = None
        self._expiry_timer: threading.Timer | None = None

    def load(self) -> None:
        """Make the stored keys valid."""
        self._book.groups = self._store.key_groups()
        grants = self._store.grants()
        stored_keys = tuple(
            StoredKey(grant=grant, digest=digest.hex(), created_at=created_at)
            for grant, digest, created_at in grants
        )
        in_file: tuple[StoredKey, ...] = ()
        # Keys that this version cannot read are keys: they leave the gateway closed.
        is_closed = bool(grants.problem) and not stored_keys
        try:
            in_file = (
                _STORED_KEYS.validate_json(self._file.read_bytes()) if self._file.exists() else ()
            )
        except (OSError, ValidationError) as error:
            if not stored_keys:
                log.error(  # noqa: TRY400
                    "the stored keys cannot be read; only the keys of the settings are valid",
                    error=str(error)[:300],
                )
                is_closed = True
        struck = {(key.grant.name, key.created_at) for key in in_file if key.is_struck}
        valid = tuple(key for key in stored_keys if (key.grant.name, key.created_at) not in struck)
        if not stored_keys:
            valid = tuple(key for key in in_file if not key.is_struck)
            if valid:
                log.warning(
                    "the database had no readable keys; the keys of the file next to it are valid",
                    keys=len(valid),
                )
                if self._store.problem is None and not grants.problem:
                    for key in valid:
                        self._store.add_key(key.grant, bytes.fromhex(key.digest), key.created_at)
        self._swap_keys(valid, is_closed=is_closed)
        if stored_keys and valid != in_file:
            self._revoked = {
                key.grant.name: key.evolve(digest=_REVOKED_DIGEST)
                for key in stored_keys
                if (key.grant.name, key.created_at) in struck
            }
            self._remove_revoked_keys()

    def add(self, grant: Grant) -> Secret:
        """The new key, for the only time. Raises Conflict, StoreError."""
        self._store.changeable()
        with self._lock:
            if self._revoked and not self._remove_revoked_keys():
                raise StoreError(
                    "A revoked key is still in the database. Nothing was changed.",
                    hint="Free disk space or repair the permissions of FITSERVE_DATA_DIR.",
                )
            if grant.name in SETTINGS_KEYS or any(
                key.grant.name == grant.name for key in self.stored_keys
            ):
                raise Conflict(
                    f"The key {grant.name} exists already.",
                    hint="Remove it first, or use another name.",
                )
            grants = (grant, *(key.grant for key in self.stored_keys))
            if "admin" not in self._lasting_scopes(grants):
                raise Conflict(
                    "The first key must have the scope admin and no end: without such a key, keys"
                    " could not be created or removed.",
                    hint=(
                        "Create an admin key first (`fitserve keys add NAME --scope admin`), or set"
                        " FITSERVE_ADMIN_KEY."
                    ),
                )
            if build_key(grant, b"").has_ended():
                raise BadRequest(
                    f"The day {grant.expires} is over.", hint="Give a later day.", param="expires"
                )
            if grant.group is not None and grant.group not in self._book.groups:
                self._save_groups({**self._book.groups, grant.group: Allowance()})
            self._check_budget(grant.budget)
            self._book.budgets_of(grant, grants)
            key = new_key()
            stored_key = StoredKey(grant=grant, digest=hash_key(key).hex(), created_at=time.time())
            keys = (*self.stored_keys, stored_key)
            self._write_file(keys)
            self._store.add_key(grant, bytes.fromhex(stored_key.digest), stored_key.created_at)
            self._swap_keys(keys)
        log.info("key created", key=grant.name, scopes=grant.scopes)
        return key

    def remove(self, name: str) -> bool:
        """Revoke a key immediately; its current requests are finished. Returns whether the disk has
        the change; otherwise it is retried, and a gateway that starts before accepts the key.
        Raises NotFound, Conflict."""
        with self._lock:
            if name in SETTINGS_KEYS:
                raise Conflict(
                    f"The key {name} comes from the settings.",
                    hint=f"Unset FITSERVE_{name.upper()}_KEY and restart.",
                )
            remaining = tuple(key for key in self.stored_keys if key.grant.name != name)
            if len(remaining) == len(self.stored_keys):
                raise _no_key_error(name)
            has_keys = bool(remaining or self._keys.fixed_scopes)
            if has_keys and "admin" not in self._lasting_scopes(key.grant for key in remaining):
                raise Conflict(
                    "This is the last key with the scope admin and no end: without it, keys could"
                    " not be created or removed.",
                    hint="Remove the other keys first, or create another key with the scope admin.",
                )
            revoked = next(key for key in self.stored_keys if key.grant.name == name)
            self._swap_keys(remaining)
            self._revoked[name] = revoked
            struck = self._strike(revoked)
            durable = self._remove_revoked_keys() or struck
        if durable:
            log.info("key removed", key=name)
        else:
            log.warning(
                "key removed, but not yet on the disk; a restart before that would bring the key"
                " back",
                key=name,
            )
        return durable

    def set_budget(self, name: str, budget: Allowance | None) -> None:
        """Replace the budget of a key, whose usage stays. None: no budget. Raises NotFound,
        Conflict, BadRequest, StoreError."""
        self._store.changeable()
        with self._lock:
            former_key = next((key for key in self.stored_keys if key.grant.name == name), None)
            if former_key is None:
                raise _no_key_error(name)
            self._check_budget(budget)
            grant = former_key.grant.evolve(budget=budget, group=None)
            for limit in self._book.budgets_of(grant, ()):
                self._book.record_warnings(limit, 0)
            grant = former_key.grant.evolve(budget=budget)
            keys = tuple(
                key.evolve(grant=grant) if key is former_key else key for key in self.stored_keys
            )
            self._write_file(keys)
            self._store.save_grant(grant)
            self._swap_keys(keys)
        log.info("budget of a key set", key=name)

    def person_budgets(self, name: str, groups: Collection[str]) -> tuple[KeyBudget, ...]:
        """The budgets of a person with these groups, until `refresh_person`. One that cannot be
        counted lets nobody ask.

        name: that of the person in lists.
        """
        with self._lock:
            self._people.pop(name, None)
            self._people[name] = frozenset(groups)
            if len(self._people) > _MAX_PEOPLE:
                del self._people[next(iter(self._people))]
            return self._person_budgets(name)

    def refresh_person(self, name: str) -> None:
        """Give the page keys of a person the present budgets, which may have changed while one was
        made."""
        with self._lock:
            self._update_people({name})

    def _person_budgets(self, name: str) -> tuple[KeyBudget, ...]:
        grants = [key.grant for key in self.stored_keys]
        try:
            return self._book.person_budgets(name, self._people[name], grants)
        except StoreError as error:
            log.error("a budget cannot be counted", key=name, error=str(error))  # noqa: TRY400
            owner = f"{PERSON_OWNER}{name.removeprefix(PERSON_PREFIX)}"
            return (KeyBudget(owner, 0, (), is_lost=True),)

    def _update_people(self, names: Collection[str]) -> None:
        """Give the page keys of these people their present budgets."""
        present_names = names & self._people.keys()
        if self._keys.replace_budgets({name: self._person_budgets(name) for name in present_names}):
            self._on_change()

    def _rows_in_use(self) -> set[int]:
        """The rows of the ledger that keys count in."""
        callers = (*(caller for _, caller in self._callers.values()), *self._keys.sessions)
        return {
            budget.row
            for caller in callers
            if caller.limit is not None
            for budget in caller.limit.budgets
        }

    @property
    def groups(self) -> dict[str, Allowance]:
        """The budgets of groups of keys, by name."""
        return dict(self._book.groups)

    def set_group(self, name: str, budget: Allowance) -> None:
        """Replace the budget of a group, which may be new. Raises BadRequest, StoreError."""
        self._store.changeable()
        with self._lock:
            self._check_budget(budget)
            self._save_groups({**self._book.groups, name: budget})
            for limit in self._book.group_budget(name, [key.grant for key in self.stored_keys]):
                self._book.record_warnings(limit, 0)
            self._callers = {}
            self._swap_keys(self.stored_keys)
        log.info("budget of a group set", group=name)

    def remove_group(self, name: str) -> None:
        """Remove a group without keys. Raises NotFound, Conflict, StoreError."""
        self._store.changeable()
        with self._lock:
            if name not in self._book.groups:
                raise NotFound(
                    f"There is no group {name[:200]}.", hint="`fitserve keys ls` lists the groups."
                )
            members = [key.grant.name for key in self.stored_keys if key.grant.group == name]
            if members:
                raise Conflict(
                    f"The group {name} has keys: {', '.join(members[:5])}.",
                    hint="Remove them first, or give the group a budget without limits.",
                )
            self._save_groups(
                {group: budget for group, budget in self._book.groups.items() if group != name}
            )

    def _save_groups(self, groups: dict[str, Allowance]) -> None:
        self._store.save_key_groups(groups)
        self._book.groups = groups
        self._update_people({session.name for session in self._keys.sessions})

    def _check_budget(self, budget: Allowance | None) -> None:
        """Raise BadRequest for a budget of money without prices."""
        if budget is not None and budget.needs_prices and not self._book.prices.models:
            raise BadRequest(
                "A budget of money needs prices, and the gateway has none.",
                hint="Name a file of prices in FITSERVE_PRICES, and restart.",
                param="budget",
            )

    @property
    def has_budgets(self) -> bool:
        return any(
            caller.limit is not None and caller.limit.budgets
            for _, caller in list(self._callers.values())
        ) or bool(self._book.groups)

    def budget_uses(self) -> list[BudgetUse]:
        """All budgets with their usage, each once."""
        with self._lock:
            grants = [key.grant for key in self.stored_keys]
            budgets = [
                budget
                for _, caller in self._callers.values()
                if caller.limit is not None
                for budget in caller.limit.budgets
            ]
            for name in self._book.groups:
                budgets += self._book.group_budget(name, grants)
            return list(self._book.use_of({budget.owner: budget for budget in budgets}.values()))

    def record_warnings(self, budget: KeyBudget, bits: int) -> None:
        """Mark warnings of a budget as given. Raises StoreError."""
        with self._lock:
            self._book.record_warnings(budget, bits)

    def _caller_of(self, key: StoredKey) -> Key:
        """The caller with a stored key. A budget that cannot be counted lets nobody in."""
        grants = [member.grant for member in self.stored_keys] if key.grant.group else []
        try:
            budgets = self._book.budgets_of(key.grant, grants)
        except StoreError as error:
            log.error(  # noqa: TRY400
                "a budget cannot be counted", key=key.grant.name, error=str(error)
            )
            budgets = (KeyBudget(f"key {key.grant.name}", 0, (), is_lost=True),)
        return build_key(key.grant, bytes.fromhex(key.digest), budgets)

    def _lasting_scopes(self, grants: Iterable[Grant]) -> frozenset[Scope]:
        """The scopes that keys with these grants and those of the settings have without an end."""
        lasting_grants = (grant for grant in grants if grant.expires is None)
        return self._keys.fixed_scopes.union(*(grant.scopes for grant in lasting_grants))

    def close(self) -> None:
        """End all retries."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._expiry_timer is not None:
                self._expiry_timer.cancel()
                self._expiry_timer = None

    def _strike(self, key: StoredKey) -> bool:
        """Write zeros over the digest in the file, which needs no disk space. Returns whether they
        are on the disk."""
        if key.is_struck:
            return True
        try:
            with self._file.open("r+b") as file:
                offset = file.read().find(key.digest.encode())
                if offset < 0:
                    return False
                file.seek(offset)
                file.write(_REVOKED_DIGEST.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            return False
        self._revoked[key.grant.name] = key.evolve(digest=_REVOKED_DIGEST)
        return True

    def _remove_revoked_keys(self) -> bool:
        """Remove revoked keys from the database, then from the file. Returns whether all is done;
        otherwise it is retried later."""
        if self._store.problem is None:
            with contextlib.suppress(StoreError):
                for name in self._revoked:
                    with contextlib.suppress(NotFound):
                        self._store.remove_key(name)
                self._write_file(self.stored_keys)
                self._revoked.clear()
                return True
        # The database is in memory. The struck digest has to stay in the file, at least until the
        # database returns to its own.
        elif (
            not [key for key in list(self._revoked.values()) if not self._strike(key)]
            and not self._store.returns
        ):
            self._revoked.clear()
            return True
        if self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(_RETRY_S, self._retry)
            self._timer.daemon = True
            self._timer.start()
        return False

    def _retry(self) -> None:
        with self._lock:
            self._timer = None
            names = list(self._revoked)
            if names and self._remove_revoked_keys():
                log.info("revoked keys are removed from the database now", keys=names)

    def _swap_keys(self, stored_keys: tuple[StoredKey, ...], *, is_closed: bool = False) -> None:
        self.stored_keys = stored_keys
        former_callers = self._callers
        # One of thousands of keys changes, so the others stay as they are.
        self._callers = {
            id(key): former_callers.get(id(key)) or (key, self._caller_of(key))
            for key in stored_keys
        }
        callers = [caller for _, caller in self._callers.values()]
        self._keys.swap(callers, is_closed=is_closed)
        self._schedule_expiry(callers)
        self._on_change()

    def _schedule_expiry(self, callers: Iterable[Key]) -> None:
        """Have the table checked again after the next end of a key, which ends its streams."""
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
            self._expiry_timer = None
        ends = [key.ends_at for key in callers if key.ends_at is not None and not key.has_ended()]
        if ends:
            delay_s = min(max(0.0, min(ends) - time.time()), _CLOCK_LOOK_S)
            self._expiry_timer = threading.Timer(delay_s, self._expire)
            self._expiry_timer.daemon = True
            self._expiry_timer.start()

    def _expire(self) -> None:
        with self._lock:
            if self._expiry_timer is not None:
                self._swap_keys(self.stored_keys)

    def _write_file(self, stored_keys: tuple[StoredKey, ...]) -> None:
        try:
            atomic_file.write(self._file, _STORED_KEYS.dump_json(stored_keys))
        except OSError as error:
            raise unwritten_error(
                f"{self._file} cannot be written", self._file.parent, error
            ) from None


def _no_key_error(name: str) -> NotFound:
    return NotFound(
        f"The key {name[:200]} does not exist.", hint="`fitserve keys ls` lists the keys."
    )
