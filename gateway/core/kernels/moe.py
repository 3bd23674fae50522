"""Which backend the experts of a layer get: one engine version's rules (moe.yaml, data) applied to one layer. Pure.

    MoeRules + MoeShape (per rank) + compute capability -> KernelChoice

As in linear.py the first backend of an ordered list that accepts the layer wins, and why each before it refused is kept. The
quantization method that takes the layer decides the list. A backend may be chosen that then cannot compute the layer, because
nothing asks its CUDA code beforehand: that is "crash".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gateway.core.kernels.conditions import Case, Check, MoeShape, first_refusal, numbers, refusal
from gateway.domain import Refusal, Value

__all__ = ["MoeChoice", "MoeRules", "MoeShape", "choose_moe"]


@dataclass(frozen=True, kw_only=True)
class MoeChoice:
    """`none`: the engine will refuse the model. `crash`: it loads, and fails at the first request, as `note` says.

    `unknown`: these rules do not describe the layer.
    """

    kernel: str | None
    method: str = ""  # the engine's quantization method that takes the layer
    padded_to: tuple[int, int] | None = None  # (hidden, intermediate) per rank
    refused: tuple[Refusal, ...] = ()
    status: Literal["ok", "none", "unknown", "crash"]
    crashes: tuple[tuple[str, str], ...] = ()  # which of w13 and w2, and why
    note: str = ""


# --- the rules, as moe.yaml has them ---


class Rounding(Value):
    """Sizes per rank grow to multiples of these, where `when` holds; `group`: the intermediate one to whole groups too."""

    hidden: int = Field(1, ge=1)
    intermediate: int = Field(1, ge=1)
    group: bool = False
    when: Check = Check()


class Backend(Value):
    source: str
    requires: tuple[Check, ...] = ()  # what the engine's Python asks
    then: tuple[Check, ...] = ()  # what it asks once the backend is chosen: no other one is tried
    runs: tuple[Check, ...] = ()  # what only its CUDA code asks, of each of the two products
    pads: tuple[Rounding, ...] = ()  # the first that applies
    slow: str = ""  # why a faster one would be better


class Move(Value):
    """Where `when` holds, `backend` comes directly before another, or first, or last."""

    when: Check
    backend: str
    before: str = ""
    to: Literal["", "front", "back"] = ""


class Method(Value):
    """One quantization method of the engine: the layers it takes and its backends, in order of preference."""

    name: str
    match: Check
    source: str
    backends: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    forced: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # by --moe-backend; a name that is missing is refused
    ignores: tuple[str, ...] = ()  # values of --moe-backend that leave the choice automatic; "*": all
    requires: tuple[Check, ...] = ()  # whatever the backend
    refuses: str = ""  # the engine turns such layers away


class MoeRules(Value):
    """profiles/engines/KIND/VERSION/moe.yaml. Sources are files of that version, with lines."""

    packages: tuple[str, ...]  # what the official image has of what the rules ask for
    methods: tuple[Method, ...]
    backends: dict[str, Backend]  # by scheme and name: "fp8 TRITON"

    # Compared by identity: a version's rules are read once, and answers are remembered for each.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @model_validator(mode="after")
    def _describes_what_it_lists(self) -> Self:
        for method in self.methods:
            listed = {*method.backends, *(name for names in method.forced.values() for name in names)}
            if unknown := sorted(listed - set(self.backends)):
                raise ValueError(f"{method.name} lists {', '.join(unknown)}, which `backends` does not describe")
            for move in method.moves:
                if not {move.backend, move.before or move.backend} <= set(method.backends):
                    raise ValueError(f"{method.name} moves {move.backend} but does not list it and where it goes")
        return self


# --- the evaluator ---


def choose_moe(
    rules: MoeRules,
    shape: MoeShape,
    capability: str,
    packages: frozenset[str] | None = None,
    forced: str | None = None,
    variables: frozenset[str] = frozenset(),
) -> MoeChoice:
    """The backend of these experts on a GPU of this capability ("8.6").

    packages: importable where the engine runs; None: what its official image has. forced: --moe-backend. variables: environment
    variables that are on.
    """
    if not shape.routing:
        return _whatever_the_routing(rules, shape, capability, packages, forced, variables)
    installed = frozenset(rules.packages) if packages is None else packages
    case = Case(shape.w13, capability, installed, frozenset(), experts=shape, variables=variables)
    if numbers(capability) is None:
        return _unknown(f"{capability!r} is not a compute capability")
    method = next((m for m in rules.methods if refusal(m.match, case) is None), None)
    if method is None:
        made = f" of {shape.origin}" if shape.origin else ""
        return _unknown(f"these rules have no path for {shape.scheme.kind} experts{made} like these")
    if method.refuses:
        return _none(method, Refusal(kernel="", reason=method.refuses))
    names = _ordered(method, case)
    if forced and forced != "auto" and forced not in method.ignores and "*" not in method.ignores:
        if not method.forced:
            return _unknown(f"what --moe-backend {forced} does with these experts is not known here")
        if forced not in method.forced:
            reason = f"is not a choice for {shape.scheme.kind} experts"
            return _none(method, Refusal(kernel=f"--moe-backend {forced}", reason=reason))
        names = list(method.forced[forced])
    refused: list[Refusal] = []
    for name in names:
        backend = rules.backends[name]
        shown = name.rpartition(" ")[2]
        why = first_refusal(backend.requires, case)
        if why is None:
            whole = first_refusal((*method.requires, *backend.then), case)
            if whole:
                return _none(method, *refused, Refusal(kernel=shown, reason=whole))
            return _taken(method, backend, shown, case, tuple(refused))
        refused.append(Refusal(kernel=shown, reason=why))
    return _none(method, *refused)


_ROUTINGS = ("renormalize", "default", "sigmoid", "minimax", "deepseek")


def _whatever_the_routing(rules: MoeRules, shape: MoeShape, *asked: Any) -> MoeChoice:
    """For a router that is not known: what every kind of router gets, if that is the same."""
    choices = [choose_moe(rules, replace(shape, routing=routing), *asked) for routing in _ROUTINGS]
    if len({(choice.kernel, choice.status, choice.padded_to) for choice in choices}) > 1:
        return _unknown("the backend depends on how experts are chosen for a token, which is not known here of this family")
    return choices[0]


def _ordered(method: Method, case: Case) -> list[str]:
    names = list(method.backends)
    for move in method.moves:
        if refusal(move.when, case) is None:
            names.remove(move.backend)
            place = {"front": 0, "back": len(names)}.get(move.to)
            names.insert(names.index(move.before) if place is None else place, move.backend)
    return names


def _taken(method: Method, backend: Backend, name: str, case: Case, refused: tuple[Refusal, ...]) -> MoeChoice:
    assert case.experts is not None  # noqa: S101 - choose_moe made the case
    padded = _padded(backend.pads, case)
    hidden, intermediate = padded or (case.experts.hidden, case.experts.intermediate)
    grown = replace(case.experts, hidden=hidden, intermediate=intermediate)
    crashes = []
    for label, product in (("w13", grown.w13), ("w2", grown.w2)):
        there = Case(product, case.capability, case.packages, experts=grown, disabled=case.disabled)
        why = [reason for reason in (refusal(check, there) for check in backend.runs) if reason]
        crashes += [(label, f"{label}: K={product.k}, N={product.n}: {'; '.join(why)}")] if why else []
    return MoeChoice(
        kernel=name,
        method=method.name,
        padded_to=padded,
        refused=refused,
        status="crash" if crashes else "ok",
        crashes=tuple(crashes),
        note="; ".join(reason for _, reason in crashes) or backend.slow,
    )


def _padded(pads: tuple[Rounding, ...], case: Case) -> tuple[int, int] | None:
    shape = case.experts
    rounding = next((one for one in pads if refusal(one.when, case) is None), None)
    if rounding is None or shape is None:
        return None
    group = max(shape.scheme.group, 1) if rounding.group else 1
    grown = (_up(shape.hidden, rounding.hidden), _up(shape.intermediate, math.lcm(rounding.intermediate, group)))
    return None if grown == (shape.hidden, shape.intermediate) else grown


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _none(method: Method, *refused: Refusal) -> MoeChoice:
    return MoeChoice(kernel=None, method=method.name, refused=refused, status="none")


def _unknown(reason: str) -> MoeChoice:
    return MoeChoice(kernel=None, refused=(Refusal(kernel="", reason=reason),), status="unknown")
