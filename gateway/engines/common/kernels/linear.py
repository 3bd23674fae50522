"""Choice of the kernel for a dense linear layer, by the rules of one engine version (linear.yaml).
Pure.

LinearRules + LinearShape (per rank) + compute capability -> KernelChoice

The engine walks an ordered list of kernels and takes the first that accepts the layer. `choose`
does the same, and keeps the refusals. A layer that the rules do not describe is "unknown", never a
guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, Self

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
from gateway.models.scheme import Kind, LinearShape, round_up

DISABLED_REASON = "disabled by VLLM_DISABLED_KERNELS"
_DISABLES = "VLLM_DISABLED_KERNELS="


class KernelChoice(NamedTuple):
    """The kernel for a dense layer, or the reason that there is none.

    `none`: the engine will refuse the model. `crash`: the model loads, and fails when it first
        computes; `note` says why.
    `unknown`: these rules do not describe the layer.
    """

    kernel: str | None
    status: Literal["ok", "none", "unknown", "crash"]
    padded_to: tuple[int, int] | None = None  # (k, n)
    refusals: tuple[Refusal, ...] = ()
    note: str = ""  # why the kernel is slow, or would crash
    reason: str = ""  # why the engine takes it


# --- the rules, as linear.yaml has them ---


class PaddingTiles(Value):
    """Grow to the cheapest of these (k, n) tiles, k also to whole groups."""

    tiles: tuple[tuple[int, int], ...]


class LinearKernel(Value):
    source: str = ""
    requires: tuple[Check, ...] = ()
    # These checks come when the layer is first computed, once the kernel is chosen.
    runs: tuple[Check, ...] = ()
    pads: PaddingTiles | None = None
    # VLLM_DISABLED_KERNELS can name this kernel.
    is_disablable: bool = Field(True, alias="disablable")
    slow_reason: str = Field("", alias="slow")  # why a faster kernel would be better


class CodePath(Value):
    """One code path of the engine: its layers, and its kernels in order of preference."""

    match: Check
    source: str = ""
    kernels: tuple[str, ...] = ()
    activation: str = "16-bit"
    moves: tuple[OrderChange, ...] = ()
    is_automatic: bool = Field(False, alias="automatic")  # only while no backend is forced
    is_disablable: bool = Field(True, alias="disablable")  # this path obeys VLLM_DISABLED_KERNELS
    refuses: str = ""  # why the engine turns layers that match away before any kernel is asked


class BorrowedLinearRules(Value):
    """Layers that are as the rules of another version say."""

    where: Check
    rules: LinearRules


class LinearRules(RuleFile):
    """The rules of profiles/engines/KIND/VERSION/linear.yaml.

    Sources are files of that version, with lines.
    """

    packages: tuple[str, ...]  # of those that the rules ask for, the packages of the official image
    # --linear-backend; empty: the version has no such option
    backends: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    backend_without_kernel: Literal["refuse", "ignore"] = "refuse"
    backend_source: str = ""
    variables: tuple[VariableEffect, ...] = ()
    paths: tuple[CodePath, ...]
    kernels: dict[str, LinearKernel]
    borrowed_rules: tuple[BorrowedLinearRules, ...] = Field(
        (), description="layers that other rules describe"
    )

    def add_choices(
        self, choices: Iterable[KnownChoice], other_rules: Mapping[str, LinearRules]
    ) -> LinearRules:
        """These rules with choices of the version's own code. other_rules: by version."""
        borrowed_rules = []
        paths = []
        kernels = dict(self.kernels)
        for choice in choices:
            match_check = Check.trust_conditions(dict(choice.conditions))
            if choice.rules is not None:
                borrowed_rules.append(
                    BorrowedLinearRules(where=match_check, rules=other_rules[choice.rules])
                )
            elif choice.refuses_choice:
                paths.append(CodePath(match=match_check, refuses=CODE_REFUSAL))
            elif choice.backend is not None:
                kernels.setdefault(choice.backend, LinearKernel())
                paths.append(CodePath(match=match_check, kernels=(choice.backend,)))
        return self.evolve(
            borrowed_rules=tuple(borrowed_rules), paths=(*paths, *self.paths), kernels=kernels
        )

    @cached_property
    def borrowed_rules_of(self) -> Mapping[Kind, tuple[BorrowedLinearRules, ...]]:
        """The loans that may match each kind of scheme."""
        return index_by_scheme(self.borrowed_rules, lambda loan: loan.where)

    @cached_property
    def paths_of(self) -> Mapping[Kind, tuple[CodePath, ...]]:
        """The paths that may match layers of each kind of scheme."""
        return index_by_scheme(self.paths, lambda path: path.match)

    @model_validator(mode="after")
    def _check_listed_rows(self) -> Self:
        for path in self.paths:
            if unknown_names := [kernel for kernel in path.kernels if kernel not in self.kernels]:
                raise ValueError(
                    f"a path lists {', '.join(unknown_names)}, which `kernels` does not describe"
                )
            for move in path.moves:
                if not move.has_both(path.kernels):
                    raise ValueError(
                        f"a path moves {move.name} before {move.before_kernel} but does not list"
                        " both"
                    )
        return self


# --- the evaluator ---


def disabling(kernels: Iterable[str]) -> frozenset[str]:
    """The items of `variables` that disable these kernels."""
    return frozenset(f"{_DISABLES}{kernel}" for kernel in kernels if kernel)


def disabled_kernels(variables: Iterable[str]) -> frozenset[str]:
    return frozenset(
        variable.removeprefix(_DISABLES) for variable in variables if variable.startswith(_DISABLES)
    )


def choose(
    rules: LinearRules,
    shape: LinearShape,
    capability: str,
    packages: frozenset[str] | None = None,
    variables: frozenset[str] = frozenset(),
    forced_backend: str | None = None,
    refusals: Callable[[str], str | None] = lambda _: None,
) -> KernelChoice:
    """The kernel of this layer on a GPU of this capability ("8.6").

    packages: packages that the engine can import; None: those of its official image.
    variables: those of the environment as rule_variables names them, and `disabling` kernels.
    forced_backend: --linear-backend.
    refusals: observed ones for such a layer, which override these rules.
    """
    installed_packages = frozenset(rules.packages) if packages is None else packages
    disabled = disabled_kernels(variables)
    subject = Subject(
        capability, installed_packages, layer=shape, disabled=disabled, variables=variables
    )
    if forced_backend == "auto":
        forced_backend = None
    if numbers(capability) is None:
        return _unknown_choice("", f"{capability!r} is not a compute capability")
    if forced_backend and forced_backend not in rules.backends:
        return _unknown_choice(
            "--linear-backend", f"this version has no backend {forced_backend!r}"
        )
    for loan in rules.borrowed_rules_of.get(shape.scheme.kind, ()):
        if loan.where.refusal(subject) is None:
            return choose(
                loan.rules, shape, capability, packages, variables, forced_backend, refusals
            )
    paths = rules.paths_of.get(shape.scheme.kind, ())
    path = next(
        (
            p
            for p in paths
            if not (p.is_automatic and forced_backend) and p.match.refusal(subject) is None
        ),
        None,
    )
    if path is None:
        return _unknown_choice(
            "", f"these rules have no path for {shape.scheme.kind} layers like this"
        )
    if path.refuses:
        return _no_kernel(Refusal(kernel="", reason=path.refuses))
    names = _kernel_names(rules, path, shape, subject, forced_backend)
    if isinstance(names, KernelChoice):
        return names
    subject = subject._replace(activation=path.activation)
    choice = _first_kernel(rules, path, names, subject, refusals)
    is_demanded = forced_backend and set(names) <= set(rules.backends[forced_backend])
    flag = f"--linear-backend {forced_backend}" if is_demanded else ""
    return choice._replace(reason=choice_reason(names, flag)) if choice.kernel else choice


def _kernel_names(
    rules: LinearRules,
    path: CodePath,
    shape: LinearShape,
    subject: Subject,
    forced_backend: str | None,
) -> list[str] | KernelChoice:
    """The kernels of a path in the engine's order, or the choice where none may be tried."""
    names = sort_by_preference(path.kernels, path.moves, subject)
    if forced_backend:
        backend_kernels = [name for name in names if name in rules.backends[forced_backend]]
        if not backend_kernels and rules.backend_without_kernel == "refuse":
            reason = f"has no kernel for {shape.scheme.kind} layers"
            return _no_kernel(Refusal(kernel=f"--linear-backend {forced_backend}", reason=reason))
        return backend_kernels or names
    subject = subject._replace(activation=path.activation)
    allowed_names = allowed_kernels(rules.variables, names, subject, {})
    for name in allowed_names.names:
        if name not in rules.kernels:
            return _unknown_choice(
                allowed_names.demand, f"these rules do not describe the kernel {name}"
            )
    return allowed_names.names


def _first_kernel(
    rules: LinearRules,
    path: CodePath,
    names: Sequence[str],
    subject: Subject,
    refusals: Callable[[str], str | None],
) -> KernelChoice:
    """The first of these kernels that accepts the layer."""
    kernel_refusals: list[Refusal] = []
    for name in names:
        kernel = rules.kernels[name]
        obstacle = first_refusal(kernel.requires, subject)
        is_at_start = obstacle is None or ".cu" in kernel.source
        obstacle = obstacle or refusals(name)
        if (
            obstacle is None
            and name in subject.disabled
            and path.is_disablable
            and kernel.is_disablable
        ):
            obstacle = DISABLED_REASON
        if obstacle is None:
            return _accepting_choice(name, kernel, subject, kernel_refusals)
        kernel_refusals.append(
            Refusal(
                kernel=name,
                reason=obstacle,
                is_at_start=is_at_start and obstacle != DISABLED_REASON,
            )
        )
    return _no_kernel(*kernel_refusals)


def _accepting_choice(
    name: str, kernel: LinearKernel, subject: Subject, refusals: list[Refusal]
) -> KernelChoice:
    """The choice of a kernel that accepts the layer; its first computation may still crash."""
    shape = subject.layer
    assert shape is not None  # noqa: S101 - of a dense layer alone
    crash = first_refusal(kernel.runs, subject)
    return KernelChoice(
        kernel=name,
        padded_to=_padded_sizes(kernel.pads, shape),
        refusals=tuple(refusals),
        status="crash" if crash else "ok",
        note=f"K={shape.k}, N={shape.n}: {crash}" if crash else kernel.slow_reason,
    )


def _no_kernel(*refusals: Refusal) -> KernelChoice:
    return KernelChoice(kernel=None, refusals=refusals, status="none")


def _unknown_choice(subject: str, reason: str) -> KernelChoice:
    return KernelChoice(
        kernel=None, refusals=(Refusal(kernel=subject, reason=reason),), status="unknown"
    )


def _padded_sizes(pads: PaddingTiles | None, shape: LinearShape) -> tuple[int, int] | None:
    if pads is None:
        return None
    group_size = max(shape.scheme.group, 1)
    grown_sizes = [
        (round_up(shape.k, math.lcm(k, group_size)), round_up(shape.n, n)) for k, n in pads.tiles
    ]
    best_sizes = min(grown_sizes, key=lambda kn: (kn[0] * kn[1], kn[0] + kn[1]))
    return None if best_sizes == (shape.k, shape.n) else best_sizes
