"""Choice of the backend for experts, by the rules of one engine version (moe.yaml). Pure.

MoeRules + MoeShape (per rank) + compute capability -> KernelChoice

The first backend of an ordered list that accepts the layer wins; the refusals of those before it
are kept. The quantization method that accepts the layer determines the list. The engine may choose
a backend that cannot compute the layer, because nothing checks its CUDA code beforehand: that is
"crash".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from gateway.domain import KnownChoice, Refusal, Value
from gateway.domain.base import Field, model_validator
from gateway.engines.common.kernels.preference import OrderChange, sort_by_preference
from gateway.engines.common.rules.check import (
    CODE_REFUSAL,
    Check,
    RuleFile,
    first_refusal,
    index_by_scheme,
)
from gateway.engines.common.rules.choice_reasons import choice_reason
from gateway.engines.common.rules.subject import Subject, numbers
from gateway.engines.common.rules.variable_effects import VariableEffect, allowed_kernels
from gateway.models.scheme import Kind, MoeShape, round_up


class MoeChoice(NamedTuple):
    """The backend for experts, or the reason that there is none.

    `none`: the engine will refuse the model. `crash`: the model loads, and fails at the first
        request; `note` says why.
    `unknown`: these rules do not describe the layer.
    """

    kernel: str | None
    status: Literal["ok", "none", "unknown", "crash"]
    method: str = ""  # the engine's quantization method that takes the layer
    padded_to: tuple[int, int] | None = None  # (hidden, intermediate) per rank
    refusals: tuple[Refusal, ...] = ()
    crashes: tuple[tuple[str, str], ...] = ()  # which of w13 and w2, and why
    note: str = ""
    reason: str = ""  # why the engine takes it


# --- the rules, as moe.yaml has them ---


class Rounding(Value):
    """Multiples that sizes per rank grow to where `when` holds.

    rounds_to_group: the intermediate size grows to whole groups too.
    """

    hidden: int = Field(1, ge=1)
    intermediate: int = Field(1, ge=1)
    rounds_to_group: bool = Field(False, alias="group")
    when: Check = Check()


class ExpertBackend(Value):
    source: str = ""
    requires: tuple[Check, ...] = ()  # checks in the engine's Python
    # These checks come after the choice of the backend. If one refuses, the engine tries no other.
    later_checks: tuple[Check, ...] = Field((), alias="then")
    runs: tuple[Check, ...] = ()  # asked by the CUDA code alone, of each of the two products
    pads: tuple[Rounding, ...] = ()  # the first that applies
    slow_reason: str = Field("", alias="slow")  # why a faster backend would be better


class ExpertMethod(Value):
    """One quantization method of the engine: its layers, and its backends in order of
    preference."""

    name: str
    match: Check
    source: str = ""
    backends: tuple[str, ...] = ()
    moves: tuple[OrderChange, ...] = ()
    # The keys are values of --moe-backend. A name that is missing is refused.
    backends_by_flag: dict[str, tuple[str, ...]] = Field(default_factory=dict, alias="forced")
    # These values of --moe-backend leave the choice automatic. "*" means all.
    ignores: tuple[str, ...] = ()
    requires: tuple[Check, ...] = ()  # for every backend
    refuses: str = ""  # why the engine turns layers that match away


class BorrowedMoeRules(Value):
    """Experts that are as the rules of another version say."""

    where: Check
    rules: MoeRules


class MoeRules(RuleFile):
    """The rules of profiles/engines/KIND/VERSION/moe.yaml.

    Sources are files of that version, with lines.
    """

    packages: tuple[str, ...]  # of those that the rules ask for, the packages of the official image
    # Model types that the rules of methods may name. Empty: the engine asks for few by name.
    families: tuple[str, ...] = ()
    methods: tuple[ExpertMethod, ...]
    backends: dict[str, ExpertBackend]  # by scheme and name: "fp8 TRITON"
    # The keys are values of --moe-backend. Their checks hold for every GPU and any method.
    forced_requires: dict[str, tuple[Check, ...]] = Field(default_factory=dict)
    # The values of --moe-backend that the engine takes and no rule describes, by scheme. The key
    # "*" has those of all schemes that a method does not list.
    undescribed: dict[Kind, tuple[str, ...]] = Field(default_factory=dict)
    variables: tuple[VariableEffect, ...] = ()  # kernels as `backends`, or words of --moe-backend

    borrowed_rules: tuple[BorrowedMoeRules, ...] = Field(
        (), description="experts that other rules describe"
    )

    def add_choices(
        self, choices: Iterable[KnownChoice], other_rules: Mapping[str, MoeRules]
    ) -> MoeRules:
        """These rules with choices of the version's own code. other_rules: by version."""
        borrowed_rules = []
        methods = []
        backends = dict(self.backends)
        for choice in choices:
            match_check = Check.trust_conditions(dict(choice.conditions))
            if choice.rules is not None:
                borrowed_rules.append(
                    BorrowedMoeRules(where=match_check, rules=other_rules[choice.rules])
                )
            elif choice.refuses_choice:
                methods.append(ExpertMethod(name="", match=match_check, refuses=CODE_REFUSAL))
            elif choice.backend is not None:
                backends.setdefault(choice.backend, ExpertBackend())
                backend_names = (choice.backend,)
                methods.append(
                    ExpertMethod(name=choice.method, match=match_check, backends=backend_names)
                )
        return self.evolve(
            borrowed_rules=tuple(borrowed_rules),
            methods=(*methods, *self.methods),
            backends=backends,
        )

    @cached_property
    def borrowed_rules_of(self) -> Mapping[Kind, tuple[BorrowedMoeRules, ...]]:
        """The loans that may match each kind of scheme."""
        return index_by_scheme(self.borrowed_rules, lambda loan: loan.where)

    @cached_property
    def methods_of(self) -> Mapping[Kind, tuple[ExpertMethod, ...]]:
        """The methods that may match experts of each kind of scheme."""
        return index_by_scheme(self.methods, lambda method: method.match)

    @model_validator(mode="after")
    def _check_listed_rows(self) -> Self:
        for method in self.methods:
            listed_names = {
                *method.backends,
                *(name for names in method.backends_by_flag.values() for name in names),
            }
            if unknown_names := sorted(listed_names - set(self.backends)):
                raise ValueError(
                    f"{method.name} lists {', '.join(unknown_names)}, which `backends` does not"
                    " describe"
                )
            for move in method.moves:
                if not move.has_both(method.backends):
                    raise ValueError(
                        f"{method.name} moves {move.name} but does not list it and where it goes"
                    )
        return self


# --- the evaluator ---


def choose_moe(
    rules: MoeRules,
    shape: MoeShape,
    capability: str,
    packages: frozenset[str] | None = None,
    forced_backend: str | None = None,
    variables: frozenset[str] = frozenset(),
) -> MoeChoice:
    """The backend of these experts on a GPU of this capability ("8.6").

    packages: packages that the engine can import; None: those of its official image.
    forced_backend: --moe-backend.
    variables: environment variables, as rule_variables names them.
    """
    if not shape.routing:
        return _backend_for_any_routing(
            rules, shape, capability, packages, forced_backend, variables
        )
    installed_packages = frozenset(rules.packages) if packages is None else packages
    subject = Subject(
        capability, installed_packages, layer=shape.w13, experts=shape, variables=variables
    )
    if numbers(capability) is None:
        return _unknown_choice(f"{capability!r} is not a compute capability")
    for loan in rules.borrowed_rules_of.get(shape.scheme.kind, ()):
        if loan.where.refusal(subject) is None:
            return choose_moe(
                rules=loan.rules,
                shape=shape,
                capability=capability,
                packages=packages,
                forced_backend=forced_backend,
                variables=variables,
            )
    if forced_backend and (
        unmet := first_refusal(rules.forced_requires.get(forced_backend, ()), subject)
    ):
        refusal = Refusal(kernel=f"--moe-backend {forced_backend}", reason=unmet)
        return MoeChoice(kernel=None, refusals=(refusal,), status="none")
    methods = rules.methods_of.get(shape.scheme.kind, ())
    method = next((m for m in methods if m.match.refusal(subject) is None), None)
    if method is None:
        origin = f" of {shape.origin}" if shape.origin else ""
        return _unknown_choice(
            f"these rules have no path for {shape.scheme.kind} experts{origin} like these"
        )
    if method.refuses:
        return _no_backend(method, Refusal(kernel="", reason=method.refuses))
    is_demanded = forced_backend not in (None, "", "auto", *method.ignores)
    if forced_backend and is_demanded and "*" not in method.ignores:
        names = _demanded_backends(rules, method, shape, forced_backend)
        flag = f"--moe-backend {forced_backend}"
    else:
        names = _preferred_backends(rules, method, subject)
        flag = ""
    if isinstance(names, MoeChoice):
        return names
    choice = _first_backend(rules, method, names, subject)
    short_names = [_short_name(name) for name in names]
    return choice._replace(reason=choice_reason(short_names, flag)) if choice.kernel else choice


def _demanded_backends(
    rules: MoeRules, method: ExpertMethod, shape: MoeShape, forced_backend: str
) -> list[str] | MoeChoice:
    """The backends for the value of --moe-backend, or the choice where the value gives none."""
    if not method.backends_by_flag:
        return _unknown_choice(
            f"what --moe-backend {forced_backend} does with these experts is not known here"
        )
    undescribed_names = rules.undescribed.get(shape.scheme.kind, ())
    if forced_backend in undescribed_names or (
        "*" in undescribed_names and forced_backend not in method.backends_by_flag
    ):
        return _unknown_choice(f"these rules do not describe --moe-backend {forced_backend}")
    if forced_backend not in method.backends_by_flag:
        reason = f"is not a choice for {shape.scheme.kind} experts"
        return _no_backend(method, Refusal(kernel=f"--moe-backend {forced_backend}", reason=reason))
    return [*method.backends_by_flag[forced_backend]]


def _preferred_backends(
    rules: MoeRules, method: ExpertMethod, subject: Subject
) -> list[str] | MoeChoice:
    """The backends in the engine's order that variables allow, or the choice without any."""
    names = sort_by_preference(method.backends, method.moves, subject)
    if not method.backends_by_flag:
        return names
    allowed_backends = allowed_kernels(rules.variables, names, subject, method.backends_by_flag)
    if allowed_backends.refusal:
        refusal = Refusal(kernel=allowed_backends.demand, reason=allowed_backends.refusal)
        return _no_backend(method, refusal)
    for name in allowed_backends.names:
        if name not in rules.backends:
            return _unknown_choice(f"{allowed_backends.demand}: these rules do not describe {name}")
    return allowed_backends.names


def _first_backend(
    rules: MoeRules, method: ExpertMethod, names: Sequence[str], subject: Subject
) -> MoeChoice:
    """The first of these backends that accepts the experts."""
    refusals: list[Refusal] = []
    for name in names:
        backend = rules.backends[name]
        short_name = _short_name(name)
        reason = first_refusal(backend.requires, subject)
        if reason is None:
            method_refusal = first_refusal((*method.requires, *backend.later_checks), subject)
            if method_refusal:
                return _no_backend(
                    method, *refusals, Refusal(kernel=short_name, reason=method_refusal)
                )
            return _moe_choice(method, backend, short_name, subject, tuple(refusals))
        refusals.append(Refusal(kernel=short_name, reason=reason))
    return _no_backend(method, *refusals)


def _short_name(name: str) -> str:
    """The name of a backend without that of its group."""
    return name.rpartition(" ")[2]


_ROUTINGS = ("renormalize", "default", "sigmoid", "minimax", "deepseek")


def _backend_for_any_routing(rules: MoeRules, shape: MoeShape, *arguments: Any) -> MoeChoice:
    """The backend of a router that is not known: that of every kind of router, if all get one
    backend."""
    choices = [
        choose_moe(rules, shape._replace(routing=routing), *arguments) for routing in _ROUTINGS
    ]
    if len({(choice.kernel, choice.status, choice.padded_to) for choice in choices}) > 1:
        return _unknown_choice(
            "the backend depends on how experts are chosen for a token, which is not known here of"
            " this family"
        )
    return choices[0]


def _moe_choice(
    method: ExpertMethod,
    backend: ExpertBackend,
    name: str,
    subject: Subject,
    refusals: tuple[Refusal, ...],
) -> MoeChoice:
    """The choice of a backend for experts, with its crashes and grown sizes."""
    shape = subject.experts
    assert shape is not None  # noqa: S101 - of experts alone
    padded_sizes = _padded_sizes(backend.pads, shape, subject)
    grown_shape = (
        shape._replace(hidden=padded_sizes[0], intermediate=padded_sizes[1])
        if padded_sizes
        else shape
    )
    crashes = _crashes(backend, grown_shape, subject)
    return MoeChoice(
        kernel=name,
        method=method.name,
        padded_to=padded_sizes,
        refusals=refusals,
        status="crash" if crashes else "ok",
        crashes=crashes,
        note="; ".join(reason for _, reason in crashes) or backend.slow_reason,
    )


def _crashes(
    backend: ExpertBackend, shape: MoeShape, subject: Subject
) -> tuple[tuple[str, str], ...]:
    """The products of an expert, `w13` and `w2`, that the accepted backend cannot compute, and
    why."""
    crashes = []
    for label, product in (("w13", shape.w13), ("w2", shape.w2)):
        product_subject = subject._replace(layer=product, experts=shape)
        reasons = [reason for check in backend.runs if (reason := check.refusal(product_subject))]
        if reasons:
            words = f"{label}: K={product.k}, N={product.n}: {'; '.join(reasons)}"
            crashes.append((label, words))
    return tuple(crashes)


def _padded_sizes(
    pads: tuple[Rounding, ...], shape: MoeShape, subject: Subject
) -> tuple[int, int] | None:
    rounding = next((pad for pad in pads if pad.when.refusal(subject) is None), None)
    if rounding is None:
        return None
    group_size = max(shape.scheme.group, 1) if rounding.rounds_to_group else 1
    grown_sizes = (
        round_up(shape.hidden, rounding.hidden),
        round_up(shape.intermediate, math.lcm(rounding.intermediate, group_size)),
    )
    return None if grown_sizes == (shape.hidden, shape.intermediate) else grown_sizes


def _no_backend(method: ExpertMethod, *refusals: Refusal) -> MoeChoice:
    return MoeChoice(kernel=None, method=method.name, refusals=refusals, status="none")


def _unknown_choice(reason: str) -> MoeChoice:
    return MoeChoice(kernel=None, refusals=(Refusal(kernel="", reason=reason),), status="unknown")
