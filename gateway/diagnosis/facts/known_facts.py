"""An index of facts, so that facts about other plans cost nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gateway.domain import Fact

# None: the subject has no such value, so no scope matches it.
Scope = tuple[str | None, ...]


class KnownFacts:
    """All facts of a decision. Answers keep the order of the facts.

    A fact holds where its whole scope matches. So facts are indexed by kind, by the names in their
    scope, and by the values of these names. There are few sets of names.
    """

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._kinds: dict[str, list[Fact]] = {}
        self._scopes: dict[str, dict[tuple[str, ...], dict[Scope, list[tuple[int, Fact]]]]] = {}
        self._plans: dict[str, list[Fact]] = {}
        self._values: dict[tuple[str, str], set[str | None]] = {}
        self._facts = tuple(facts)
        self._has_facts_with_env = False
        for position, fact in enumerate(self._facts):
            self._kinds.setdefault(fact.kind, []).append(fact)
            names = tuple(sorted(fact.scope))
            values = tuple(fact.scope[name] for name in names)
            self._scopes.setdefault(fact.kind, {}).setdefault(names, {}).setdefault(
                values, []
            ).append((position, fact))
            if "env" in fact.scope:
                self._has_facts_with_env = True
            if "fingerprint" in fact.scope:
                self._plans.setdefault(fact.scope["fingerprint"], []).append(fact)

    def select_kind(self, kind: str) -> list[Fact]:
        return self._kinds.get(kind, [])

    def holding(self, kind: str, subject: Mapping[str, str | None]) -> Iterator[Fact]:
        """The facts of this kind whose whole scope matches the subject."""
        if kind not in self._scopes:
            return iter(())
        rows: list[tuple[int, Fact]] = []
        for names, facts in self._scopes.get(kind, {}).items():
            rows += facts.get(tuple(map(subject.get, names)), ())
        rows.sort(key=_row_position)
        return (fact for _, fact in rows)

    def may_hold(self, kind: str, name: str, value: str | None) -> bool:
        """Whether a fact of this kind can hold for this value of a scope's name. Cheaper than
        `holding`."""
        if (kind, name) not in self._values:
            self._values[kind, name] = {fact.scope.get(name) for fact in self.select_kind(kind)}
        values = self._values[kind, name]
        return value in values or None in values

    def select_env(self, env: str) -> KnownFacts:
        """The facts for an engine with these environment variables (`variables.words`).

        Facts that were learned with other variables may be due to them.
        """
        if not self._has_facts_with_env:
            return self
        return KnownFacts(
            _drop_env(fact) for fact in self._facts if fact.scope.get("env", env) == env
        )

    @property
    def has_plans(self) -> bool:
        """Whether there are facts about plans."""
        return bool(self._plans)

    def select_plan(self, fingerprint: str) -> list[Fact]:
        return self._plans.get(fingerprint, [])


def _row_position(row: tuple[int, Fact]) -> int:
    return row[0]


def _drop_env(fact: Fact) -> Fact:
    if "env" not in fact.scope:
        return fact
    return fact.evolve(scope={name: value for name, value in fact.scope.items() if name != "env"})
