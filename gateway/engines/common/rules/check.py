"""Conditions as a profile writes them, and whether they hold. Pure.

Check (from a profile) + Subject -> why it does not hold, with the numbers; None: it holds
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, cached_property
from typing import Any, Self, TypeVar, get_args

from gateway.domain import Value
from gateway.domain.base import (
    ConfigDict,
    RootModel,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    bare,
    field_validator,
    refuse,
)
from gateway.domain.value import TRUSTED_KEY
from gateway.engines.common.rules.conditions import CONDITIONS, Test, UnknownSubject
from gateway.engines.common.rules.subject import Subject
from gateway.errors import plain_problem
from gateway.models.scheme import Kind

Item = TypeVar("Item")

# A refusal that only the version's own answers show (KnownChoice).
CODE_REFUSAL = "the code of this version refuses such layers"

__all__ = [
    "CODE_REFUSAL",
    "TRUSTED_KEY",
    "Check",
    "RuleFile",
    "UnknownSubject",
    "first_refusal",
    "index_by_scheme",
]


class RuleFile(Value):
    """One rule file of an engine version, compared by identity: a file is read once, and results
    are cached for it."""

    # Values are frozen, so an inherited method of `object` would be replaced in each subclass.
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class Check(RootModel[dict[str, Any]]):
    """Conditions by name, all of which must hold; the first that does not gives the reason.

    Two names combine other checks: `when` (the rest applies only where that check holds) and
    `any_of` (one of them holds).
    """

    model_config = ConfigDict(frozen=True, defer_build=True)
    root: dict[str, Any] = {}  # noqa: RUF012

    @field_validator("root", mode="before")
    @classmethod
    def _validate_conditions(cls, conditions: Any, info: ValidationInfo) -> Any:
        if not isinstance(conditions, Mapping):
            return conditions
        if info.context and info.context.get(TRUSTED_KEY):
            return {name: _frozen_value(value) for name, value in conditions.items()}
        return {name: _valid(str(name), value) for name, value in conditions.items()}

    @classmethod
    def trust_conditions(cls, conditions: dict[str, Any]) -> Self:
        """The check of conditions that are known to be valid."""
        check: Self = bare(cls, {"root": conditions})
        return check

    @classmethod
    def read_root(cls, data: Any, *, is_trusted: bool) -> Self:
        """The value of a file's data, in a lean process. Raises NeedsPydantic."""
        if not is_trusted or not isinstance(data, Mapping):
            refuse("conditions that no test has validated")
        return cls.trust_conditions({name: _frozen_value(value) for name, value in data.items()})

    @cached_property
    def precondition(self) -> Check | None:
        return self.root.get("when")

    @cached_property
    def tests(self) -> tuple[tuple[Test, Any], ...]:
        return tuple(
            (_alternatives_refusal if name == "any_of" else CONDITIONS[name].test, requirement)
            for name, requirement in self.root.items()
            if name != "when"
        )

    def asks_for(self, name: str, value: object) -> bool:
        """Whether the check may hold where the condition `name` has this one of its values."""
        return self.precondition is not None or value in self.root.get(name, (value,))

    def refusal(self, subject: Subject) -> str | None:
        """Why it does not hold; Undecided: whether it holds is not known; None: it holds."""
        if self.precondition is not None:
            precondition_refusal = self.precondition.refusal(subject)
            if precondition_refusal is not None:
                return (
                    precondition_refusal
                    if isinstance(precondition_refusal, UnknownSubject)
                    else None
                )
        for test, requirement in self.tests:
            if reason := test(requirement, subject):
                return reason
        return None


def first_refusal(checks: Iterable[Check], subject: Subject) -> str | None:
    """Why the first check that does not hold does not; None: all hold."""
    for check in checks:
        if reason := check.refusal(subject):
            return reason
    return None


def index_by_scheme(
    items: Collection[Item], check: Callable[[Item], Check]
) -> dict[Kind, tuple[Item, ...]]:
    """The items whose check may hold for each kind of scheme, in their order."""
    return {
        kind: tuple([item for item in items if check(item).asks_for("schemes", kind)])
        for kind in get_args(Kind)
        if items
    }


def _alternatives_refusal(checks: tuple[Check, ...], subject: Subject) -> str:
    reasons = [check.refusal(subject) for check in checks]
    if None in reasons:
        return ""
    undecided = next((reason for reason in reasons if isinstance(reason, UnknownSubject)), None)
    return undecided or " and ".join(dict.fromkeys(reason for reason in reasons if reason))


def _valid(name: str, condition: Any) -> Any:
    """The value of one condition. Raises ValueError for an unknown condition or a wrong value."""
    combining = _combination_adapters()
    if name not in (*combining, *CONDITIONS):
        (suggestion,) = difflib.get_close_matches(name, [*combining, *CONDITIONS], n=1, cutoff=0)
        raise ValueError(f"there is no condition `{name}`; the nearest is `{suggestion}`")
    try:
        adapter = combining[name] if name in combining else CONDITIONS[name].operand
        return adapter.validate_python(condition)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0][
            "msg"
        ]
        raise ValueError(f"`{name}`: {plain_problem(problem)}") from None


def _frozen_value(value: Any) -> Any:
    """The value of one condition of a file that is known to be valid."""
    if type(value) is list:
        return tuple([_frozen_value(item) for item in value])
    if type(value) is dict:
        return Check.trust_conditions(
            {name: _frozen_value(condition) for name, condition in value.items()}
        )
    return value


@cache
def _combination_adapters() -> dict[str, TypeAdapter[Any]]:
    """Conditions that combine checks. Only a user's own files are validated by them."""
    return {"when": TypeAdapter(Check), "any_of": TypeAdapter(tuple[Check, ...])}
