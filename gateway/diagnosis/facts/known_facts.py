"""Facts by what they are about, so that a thousand facts about something else cost a plan nothing.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gateway.domain import Fact

# None: what the asked one does not have, which is in no scope.
Scope = tuple[str | None, ...]


class KnownFacts:
    """All facts of one decision. Every answer is in the order in which the facts were given.

    A fact holds where its whole scope does, so facts are kept by kind and by the names in their
    scope; of those names, their values. There are few such sets of names, however many facts there
    are.
    """

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._kinds: dict[str, list[Fact]] = {}
        self._scopes: dict[str, dict[tuple[str, ...], dict[Scope, list[tuple[int, Fact]]]]] = {}
        self._plans: dict[str, list[Fact]] = {}
        self._values: dict[tuple[str, str], set[str | None]] = {}
        self._facts = tuple(facts)
        self._learned_with_env = False
        for position, fact in enumerate(self._facts):
            self._kinds.setdefault(fact.kind, []).append(fact)
            names = tuple(sorted(fact.scope))
            values = tuple(fact.scope[name] for name in names)
            self._scopes.setdefault(fact.kind, {}).setdefault(names, {}).setdefault(
                values, []
            ).append((position, fact))
            if "env" in fact.scope:
                self._learned_with_env = True
            if "fingerprint" in fact.scope:
                self._plans.setdefault(fact.scope["fingerprint"], []).append(fact)

    def of(self, kind: str) -> list[Fact]:
        return self._kinds.get(kind, [])

    def holding(self, kind: str, about: Mapping[str, str | None]) -> Iterator[Fact]:
        """The facts of this kind whose whole scope is true of `about`."""
        if kind not in self._scopes:
            return iter(())
        found: list[tuple[int, Fact]] = []
        for names, facts in self._scopes.get(kind, {}).items():
            found += facts.get(tuple(map(about.get, names)), ())
        found.sort(key=_position)
        return (fact for _, fact in found)

    def about(self, kind: str, name: str, value: str | None) -> bool:
        """Whether there may be facts of this kind that hold for this value of a scope's name. A
        look at this costs less than the whole question."""
        if (kind, name) not in self._values:
            self._values[kind, name] = {fact.scope.get(name) for fact in self.of(kind)}
        known = self._values[kind, name]
        return value in known or None in known

    def under(self, env: str) -> KnownFacts:
        """The facts as they hold for an engine with these environment variables
        (`variables.words`): what was learned with others may be
        their doing."""
        if not self._learned_with_env:
            return self
        return KnownFacts(
            _without_env(fact) for fact in self._facts if fact.scope.get("env", env) == env
        )

    @property
    def about_plans(self) -> bool:
        """Whether any plan was tried before."""
        return bool(self._plans)

    def about_plan(self, fingerprint: str) -> list[Fact]:
        return self._plans.get(fingerprint, [])


def _position(row: tuple[int, Fact]) -> int:
    return row[0]


def _without_env(fact: Fact) -> Fact:
    if "env" not in fact.scope:
        return fact
    return fact.evolve(scope={name: value for name, value in fact.scope.items() if name != "env"})
