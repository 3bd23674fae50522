"""The base of the rule files of an engine version. Pure."""

from __future__ import annotations

from gateway.domain import Value


class RuleFile(Value):
    """One rule file of an engine version, compared by identity: a file is read once, and results
    are cached for it."""

    def __hash__(
        self,
    ) -> (
        int
    ):  # a method of its own: object's would be replaced in each subclass, for values are frozen
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other
