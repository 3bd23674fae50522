"""Measurements of this machine's GPUs, read from a database that a gateway may use."""

from __future__ import annotations

import contextlib
from pathlib import Path

from gateway.domain import Fact, FactKind
from gateway.domain.base import ValidationError


def measured_facts(path: Path, kind: FactKind = "machine_speed") -> list[Fact]:
    """The measurements of this machine, or of another kind; empty if the database is absent or
    unreadable."""
    if not path.is_file():
        return []
    import sqlite3  # not before there is a database

    from gateway.store.database_files import reader

    query = "SELECT fact FROM facts WHERE json_extract(fact, '$.kind')=? ORDER BY id"
    try:
        with contextlib.closing(reader(path)) as db:
            texts = [row[0] for row in db.execute(query, (kind,))]
    except sqlite3.Error:
        return []
    facts = []
    for text in texts:
        with contextlib.suppress(ValidationError):  # a row of another version
            facts.append(Fact.model_validate_json(text))
    return facts
