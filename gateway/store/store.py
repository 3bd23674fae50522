"""The store of models, attempts, facts, measurements and keys, in SQLite.

Every method is one transaction and returns once it is on the disk, so no acknowledged change is
lost. Calls block for a disk write, so the loop and the API make them in a thread.

`open_store` of store/recovery.py opens a store, also if the file is damaged or not writable.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gateway.disk_fault import disk_fault
from gateway.domain import Abilities, Attempt, Bench, Change, Fact, Failure, Plan, SleepState, Wish
from gateway.domain.grant import Allowance, Grant
from gateway.domain.running import MAX_ENDED_ATTEMPTS
from gateway.domain.wish import WishOrigin
from gateway.errors import Conflict, NotFound, StoreError
from gateway.logging import Logger
from gateway.store.database import Database
from gateway.store.event_table import EventTable
from gateway.store.readable_rows import ReadableRows, read_rows
from gateway.store.start_table import StartTable
from gateway.store.usage_table import UsageTable
from gateway.store.wish_table import (
    WishTable,
    add_version,
    complete_version,
    refuse_version,
    remove_versions,
)

log = Logger("fitserve.store")

_GROUPS: TypeAdapter[dict[str, Allowance]] = TypeAdapter(dict[str, Allowance])
# Runs of `fitserve bench` kept per model.
_MAX_BENCHES = 50


class Store:
    """The store. Raises StoreError if the database cannot be opened, read or written.

    copy: a connection to use instead of the file, which is then neither read nor written.
    problem: the reason why changes are refused, for `changeable`.
    returns: the copy is written into its file, and the problem ends, as soon as that is possible.
    """

    def __init__(
        self,
        path: Path,
        *,
        copy: sqlite3.Connection | None = None,
        problem: str | None = None,
        returns: bool = False,
    ) -> None:
        self.path = path
        self.problem = problem
        self.returns = returns
        self._database = Database(path, copy)
        self.events = EventTable(self._database)
        self.usage = UsageTable(self._database)
        self.starts = StartTable(self._database)
        self.wishes = WishTable(self._database)

    @property
    def failing(self) -> str | None:
        """The damage of the file, or the error of a change, until changes have room again."""
        return self._database.failing

    def check(self) -> None:
        """Test by an empty change whether writing works again. Raises StoreError."""
        self._database.check()

    def inspect(self) -> None:
        """Inspect the file, which others may damage, and repair it. Call it every few seconds."""
        if not self.returns:
            self._database.inspect()
        elif self._database.return_to_file():
            self.problem = None
            self.returns = False
            log.info("the database can be written again; changes are accepted", file=str(self.path))

    def changeable(self) -> None:
        """Raise StoreError if changes are refused."""
        if self.problem is not None:
            raise StoreError(
                f"Nothing can be changed now: {self.problem}.",
                hint=f"Engines keep running. {self._cure()}.",
            )

    def _cure(self) -> str:
        """The step that makes changes possible."""
        fault = disk_fault(self.path.parent)
        if self.returns:
            repair = fault.cure if fault is not None else "Repair this, unless it is repaired"
            return f"{repair}; changes are accepted some seconds later"
        if fault is not None:
            return f"{fault.cure}, then start the gateway again"
        return "Mend this, unless it is mended, and start the gateway again"

    @property
    def instance(self) -> str:
        """The id of this installation, which marks its engines."""
        return str(self._database.rows("SELECT value FROM meta WHERE key='instance'")[0][0])

    # --- models ---

    def models(self) -> list[tuple[Wish, float, bool, float]]:
        """(wish, created_at, deleting, forgiven_at) of every model, by name."""
        rows = self._database.rows(
            "SELECT wish, created_at, deleting, forgiven_at FROM models ORDER BY name"
        )
        return [(Wish.model_validate_json(row[0]), row[1], bool(row[2]), row[3]) for row in rows]

    def changes(self) -> dict[str, tuple[int, Change | None]]:
        """The generation of each model's wish and the change to a new one, by model."""
        rows = self._database.rows("SELECT name, generation, change FROM models")
        return {
            row[0]: (row[1], Change.model_validate_json(row[2]) if row[2] else None) for row in rows
        }

    def save_change(
        self, wish: Wish, generation: int, change: Change | None, origin: WishOrigin | None = None
    ) -> None:
        """Save the wish in force of a model, and its change. Raises NotFound during a removal.

        origin: the author of a new wish, which is then added to the history.
        """
        texts = wish.model_dump_json(), generation, change.model_dump_json() if change else None
        with self._database.change() as db:
            query = "UPDATE models SET wish=?, generation=?, change=? WHERE name=? AND deleting=0"
            if db.execute(query, (*texts, wish.name)).rowcount == 0:
                raise NotFound(
                    f"There is no model {wish.name}.", hint="`fitserve ps` lists the models."
                )
            if origin is not None:
                add_version(db, change.wish if change is not None else wish, origin)
            if change is not None and change.refusal_text:
                refuse_version(db, wish.name, change.refusal_text)

    def residences(self) -> dict[str, tuple[bool, float]]:
        """(stopped by its owner, last used) of every model."""
        rows = self._database.rows("SELECT name, stopped, used_at FROM models")
        return {name: (bool(is_stopped), used_at) for name, is_stopped, used_at in rows}

    def set_stopped(self, name: str, *, is_stopped: bool) -> None:
        """Note whether a model is stopped. Raises NotFound."""
        with self._database.change() as db:
            if (
                db.execute(
                    "UPDATE models SET stopped=? WHERE name=?", (int(is_stopped), name)
                ).rowcount
                == 0
            ):
                raise NotFound(f"There is no model {name}.", hint="`fitserve ps` lists the models.")

    def record_use(self, times: Mapping[str, float]) -> None:
        """Note the time of each model's last request, in Unix seconds."""
        with self._database.change() as db:
            db.executemany(
                "UPDATE models SET used_at=? WHERE name=?",
                [(time, name) for name, time in times.items()],
            )

    def add_model(self, wish: Wish, now_s: float, origin: WishOrigin | None = None) -> None:
        """Add a model. Raises Conflict when the name is taken."""
        with self._database.change() as db:
            row = db.execute("SELECT deleting FROM models WHERE name=?", (wish.name,)).fetchone()
            if row is not None:
                raise Conflict.name_error(wish.name, is_leaving=bool(row[0]))
            db.execute(
                "INSERT INTO models (name, wish, created_at) VALUES (?, ?, ?)",
                (wish.name, wish.model_dump_json(), now_s),
            )
            add_version(db, wish, origin or WishOrigin(at=now_s))

    def save_wish(self, wish: Wish) -> None:
        """Replace the wish of a model."""
        with self._database.change() as db:
            db.execute("UPDATE models SET wish=? WHERE name=?", (wish.model_dump_json(), wish.name))
            complete_version(db, wish)

    def mark_deleting(self, name: str) -> None:
        """Mark a model for removal; the loop removes it after its engines. Raises NotFound."""
        with self._database.change() as db:
            if db.execute("UPDATE models SET deleting=1 WHERE name=?", (name,)).rowcount == 0:
                raise NotFound(f"There is no model {name}.", hint="`fitserve ps` lists the models.")

    def forgive(self, name: str, now_s: float) -> None:
        """Forget the model's failures, and facts about failed plans and only about this model.

        Facts about limits and kernels stay. Raises NotFound.
        """
        with self._database.change() as db:
            if (
                db.execute("UPDATE models SET forgiven_at=? WHERE name=?", (now_s, name)).rowcount
                == 0
            ):
                raise NotFound(f"There is no model {name}.", hint="`fitserve ps` lists the models.")
            _forget_failed_plans(db, name)

    def restore(self, wish: Wish, created_at: float, attempt: Attempt) -> None:
        """Add a running model that this database does not know, with its attempt."""
        row = (
            attempt.id,
            attempt.model,
            attempt.replica,
            attempt.plan.model_dump_json(),
            attempt.fingerprint,
            attempt.port,
        )
        with self._database.change() as db:
            added = db.execute(
                "INSERT OR IGNORE INTO models (name, wish, created_at, generation) VALUES (?, ?,"
                " ?, ?)",
                (wish.name, wish.model_dump_json(), created_at, max(0, attempt.generation)),
            )
            if added.rowcount:
                add_version(db, wish, WishOrigin(at=created_at))
            db.execute(
                "INSERT OR IGNORE INTO attempts (id, model, replica, state, plan, fingerprint,"
                " port, started_at, generation) VALUES (?, ?, ?, 'starting', ?, ?, ?, ?, ?)",
                (*row, attempt.started_at, attempt.generation),
            )

    def remove_model(self, name: str) -> None:
        """Forget the model and its attempts. Facts about limits stay.

        If a plan worked, facts about failed plans stay too, so the model gets the working plan
        immediately when it is added again. Otherwise all plans may be tried again.
        """
        with self._database.change() as db:
            db.execute("DELETE FROM models WHERE name=? AND deleting=1", (name,))
            remove_versions(db, name)
            if (
                db.execute(
                    "SELECT 1 FROM attempts WHERE model=? AND ready_at IS NOT NULL", (name,)
                ).fetchone()
                is None
            ):
                _forget_failed_plans(db, name)
            db.execute("DELETE FROM attempts WHERE model=?", (name,))
            db.execute("DELETE FROM benches WHERE model=?", (name,))

    # --- attempts ---

    def add_attempt(
        self, model: str, replica: int, plan: Plan, port: int, now_s: float, generation: int = 0
    ) -> Attempt:
        """Record an attempt before its start, so that a crash leaves no unknown engine."""
        with self._database.change() as db:
            cursor = db.execute(
                "INSERT INTO attempts (model, replica, state, plan, fingerprint, port, started_at,"
                " generation) VALUES (?, ?, 'starting', ?, ?, ?, ?, ?)",
                (model, replica, plan.model_dump_json(), plan.fingerprint, port, now_s, generation),
            )
            db.execute(
                "DELETE FROM attempts WHERE model=? AND state IN ('failed', 'stopped') AND id NOT"
                " IN (SELECT id FROM attempts WHERE model=? ORDER BY id DESC LIMIT ?)",
                (model, model, MAX_ENDED_ATTEMPTS),
            )
            number = int(cursor.lastrowid or 0)
        return Attempt(
            id=number,
            model=model,
            replica=replica,
            state="starting",
            plan=plan,
            fingerprint=plan.fingerprint,
            port=port,
            started_at=now_s,
            generation=generation,
        )

    def save_plan(self, attempt: Attempt) -> None:
        """Replace the plan of a recorded attempt before its start."""
        with self._database.change() as db:
            changed_values = (attempt.plan.model_dump_json(), attempt.fingerprint, attempt.id)
            db.execute("UPDATE attempts SET plan=?, fingerprint=? WHERE id=?", changed_values)

    def save_attempt(self, attempt: Attempt, *facts: Fact) -> None:
        """Write the attempt's changed fields, and the facts of its failure, in one transaction."""
        failure = attempt.failure.model_dump_json() if attempt.failure else None
        abilities = attempt.abilities.model_dump_json() if attempt.abilities else None
        asleep_json = attempt.asleep.model_dump_json() if attempt.asleep else None
        phases = json.dumps(attempt.phases) if attempt.phases else None
        with self._database.change() as db:
            db.execute(
                "UPDATE attempts SET state=?, ready_at=?, ended_at=?, failure=?, abilities=?,"
                " asleep=?, phases=? WHERE id=?",
                (
                    attempt.state,
                    attempt.ready_at,
                    attempt.ended_at,
                    failure,
                    abilities,
                    asleep_json,
                    phases,
                    attempt.id,
                ),
            )
            for fact in facts:
                values = (fact.model_dump_json(), fact.attempt, fact.at or 0.0)
                db.execute(
                    "INSERT OR IGNORE INTO facts (fact, attempt, learned_at) VALUES (?, ?, ?)",
                    values,
                )

    def attempts(self, model: str | None = None) -> ReadableRows[Attempt]:
        """Attempts of one model, or of all, oldest first."""
        condition, values = ("WHERE model=?", (model,)) if model is not None else ("", ())
        columns = (
            "id, model, replica, state, plan, fingerprint, port, started_at, ready_at, ended_at,"
            " failure, abilities, generation, asleep, phases"
        )
        query = f"SELECT {columns} FROM attempts {condition} ORDER BY id"  # noqa: S608
        return read_rows("attempts", self._database.rows(query, values), _read_attempt)

    # --- facts ---

    def facts(self) -> list[Fact]:
        return [fact for _, fact in self.numbered_facts()]

    def verifying_software(self, fingerprint: str) -> list[dict[str, str]]:
        """The software with which the plan of this fingerprint was verified here."""
        query = (
            "SELECT json_extract(fact, '$.under') FROM facts WHERE"
            " json_extract(fact, '$.kind')='plan_verified'"
            " AND json_extract(fact, '$.scope.fingerprint')=?"
        )
        return [json.loads(row[0] or "{}") for row in self._database.rows(query, (fingerprint,))]

    def fact_texts(self) -> list[str]:
        """The facts as JSON, oldest first."""
        return [row[0] for row in self._database.rows("SELECT fact FROM facts ORDER BY id")]

    def numbered_facts(self) -> ReadableRows[tuple[int, Fact]]:
        """The facts with their numbers for `remove_fact`, oldest first."""
        rows = self._database.rows("SELECT id, fact FROM facts ORDER BY id")
        return read_rows("facts", rows, lambda row: (row[0], Fact.model_validate_json(row[1])))

    def add_facts(self, facts: Iterable[Fact]) -> int:
        """Add facts of another gateway, without its attempts. Returns the number of new facts."""
        with self._database.change() as db:
            rows = [(fact.evolve(attempt=None).model_dump_json(), fact.at or 0.0) for fact in facts]
            return db.executemany(
                "INSERT OR IGNORE INTO facts (fact, learned_at) VALUES (?, ?)", rows
            ).rowcount

    def store_measurements(self, facts: Collection[Fact]) -> None:
        """Replace the measurements of the machine.

        Facts of kind speed_ratio are removed, because they depend on the former figures.
        """
        with self._database.change() as db:
            old_ids: dict[tuple[str, object], list[int]] = {}
            for number, text in db.execute("SELECT id, fact FROM facts"):
                old_ids.setdefault(_fact_subject(text), []).append(number)
            outdated = [
                number
                for (kind, _), numbers in old_ids.items()
                if kind == "speed_ratio" and facts
                for number in numbers
            ]
            rows = [(fact.model_dump_json(), fact.at or 0.0) for fact in facts]
            outdated += [
                number for text, _ in rows for number in old_ids.get(_fact_subject(text), [])
            ]
            db.executemany("DELETE FROM facts WHERE id=?", [(number,) for number in outdated])
            db.executemany("INSERT OR IGNORE INTO facts (fact, learned_at) VALUES (?, ?)", rows)

    def store_networks(self, facts: Collection[Fact]) -> None:
        """Replace the measurements of these networks between machines."""
        subjects = {_fact_subject(fact.model_dump_json()) for fact in facts}
        query = "SELECT id, fact FROM facts WHERE json_extract(fact, '$.kind')='network_speed'"
        with self._database.change() as db:
            outdated = [
                (number,)
                for number, text in db.execute(query).fetchall()
                if _fact_subject(text) in subjects
            ]
            db.executemany("DELETE FROM facts WHERE id=?", outdated)
            rows = [(fact.model_dump_json(), fact.at or 0.0) for fact in facts]
            db.executemany("INSERT OR IGNORE INTO facts (fact, learned_at) VALUES (?, ?)", rows)

    def remove_fact(self, number: int) -> None:
        """Remove a fact. Raises NotFound."""
        with self._database.change() as db:
            if db.execute("DELETE FROM facts WHERE id=?", (number,)).rowcount == 0:
                raise NotFound(
                    f"There is no fact {number}.", hint="`fitserve facts ls` lists them."
                )

    def fact_counts(self) -> dict[str, int]:
        """The number of facts of each kind."""
        return dict(
            self._database.rows(
                "SELECT json_extract(fact, '$.kind'), count(*) FROM facts GROUP BY 1"
            )
        )

    # --- benches ---

    def add_bench(self, bench: Bench, facts: Iterable[Fact] = ()) -> None:
        """Add a measurement, and the facts from it, which replace facts about the same."""
        with self._database.change() as db:
            db.execute(
                "INSERT INTO benches (model, at, bench) VALUES (?, ?, ?)",
                (bench.model, bench.at, bench.model_dump_json()),
            )
            db.execute(
                "DELETE FROM benches WHERE model=? AND id NOT IN (SELECT id FROM benches WHERE"
                " model=? ORDER BY id DESC LIMIT ?)",
                (bench.model, bench.model, _MAX_BENCHES),
            )
            _learn_speeds(db, facts)

    def learn_speeds(self, facts: Iterable[Fact]) -> None:
        """Add facts about speeds, which replace facts about the same."""
        with self._database.change() as db:
            _learn_speeds(db, facts)

    def benches(self, model: str) -> ReadableRows[Bench]:
        """The stored measurements of a model, oldest first."""
        query = "SELECT id, bench FROM benches WHERE model=? ORDER BY id"
        rows = self._database.rows(query, (model,))
        return read_rows("benches", rows, lambda row: Bench.model_validate_json(row[1]))

    # --- keys ---

    def grants(self) -> ReadableRows[tuple[Grant, bytes, float]]:
        """(grant, digest, created_at) of every key, by name. An unreadable key is not valid."""
        query = "SELECT rowid, may, digest, created_at FROM keys ORDER BY name"
        return read_rows("keys", self._database.rows(query), _read_grant)

    def add_key(self, grant: Grant, digest: bytes, now_s: float) -> None:
        """Add a key. Raises Conflict when the name is taken."""
        with self._database.change() as db:
            row = (grant.name, digest.hex(), grant.model_dump_json(), now_s)
            if (
                db.execute(
                    "INSERT OR IGNORE INTO keys (name, digest, may, created_at) VALUES (?, ?,"
                    " ?, ?)",
                    row,
                ).rowcount
                == 0
            ):
                raise Conflict(
                    f"There is a key {grant.name} already.",
                    hint="Remove it first, or use another name.",
                )

    def save_grant(self, grant: Grant) -> None:
        """Replace the grant of a key. Raises NotFound."""
        with self._database.change() as db:
            row = grant.model_dump_json(), grant.name
            if db.execute("UPDATE keys SET may=? WHERE name=?", row).rowcount == 0:
                raise NotFound(
                    f"There is no key {grant.name}.", hint="`fitserve keys ls` lists them."
                )

    def key_groups(self) -> dict[str, Allowance]:
        """The budgets of all groups of keys, by name."""
        rows = self._database.rows("SELECT value FROM meta WHERE key='key_groups'")
        return _GROUPS.validate_json(rows[0][0]) if rows else {}

    def save_key_groups(self, groups: Mapping[str, Allowance]) -> None:
        """Replace the groups of keys."""
        text = _GROUPS.dump_json(dict(groups)).decode()
        with self._database.change() as db:
            db.execute(
                "INSERT INTO meta (key, value) VALUES ('key_groups', ?)"
                " ON CONFLICT (key) DO UPDATE SET value=excluded.value",
                (text,),
            )

    def remove_key(self, name: str) -> None:
        """Remove a key. Raises NotFound."""
        with self._database.change() as db:
            if db.execute("DELETE FROM keys WHERE name=?", (name,)).rowcount == 0:
                raise NotFound(f"There is no key {name}.", hint="`fitserve keys ls` lists them.")

    def close(self) -> None:
        self._database.close()


def _read_attempt(row: Sequence[Any]) -> Attempt:
    return Attempt(
        id=row[0],
        model=row[1],
        replica=row[2],
        state=row[3],
        plan=Plan.model_validate_json(row[4]),
        fingerprint=row[5],
        port=row[6],
        started_at=row[7],
        ready_at=row[8],
        ended_at=row[9],
        failure=Failure.model_validate_json(row[10]) if row[10] else None,
        abilities=Abilities.model_validate_json(row[11]) if row[11] else None,
        generation=row[12],
        asleep=SleepState.model_validate_json(row[13]) if row[13] else None,
        phases=json.loads(row[14]) if row[14] else {},
    )


def _read_grant(row: Sequence[Any]) -> tuple[Grant, bytes, float]:
    return Grant.model_validate_json(row[1]), bytes.fromhex(row[2]), row[3]


def _learn_speeds(db: sqlite3.Connection, facts: Iterable[Fact]) -> None:
    old_values = {
        _fact_subject(row[1]): row[0]
        for row in db.execute("SELECT id, fact FROM facts WHERE fact LIKE '%\"speed_%'")
    }
    for fact in facts:
        text = fact.model_dump_json()
        db.execute("DELETE FROM facts WHERE id=?", (old_values.get(_fact_subject(text), 0),))
        values = (text, fact.attempt, fact.at or 0.0)
        db.execute(
            "INSERT OR IGNORE INTO facts (fact, attempt, learned_at) VALUES (?, ?, ?)", values
        )


def _fact_subject(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Kind and scope of a fact."""
    fact = json.loads(text)
    return fact["kind"], tuple(sorted(fact["scope"].items()))


def _forget_failed_plans(db: sqlite3.Connection, name: str) -> None:
    db.execute(
        "DELETE FROM facts WHERE (json_extract(fact, '$.kind')='plan_failed'"
        " OR (json_extract(fact, '$.kind')='engine_fails'"
        " AND json_extract(fact, '$.scope.model') IS NOT NULL)) "
        "AND attempt IN (SELECT id FROM attempts WHERE model=?)",
        (name,),
    )
