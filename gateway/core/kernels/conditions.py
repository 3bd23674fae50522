"""What a rule may ask of a layer and a GPU, as data, and the answer in words. Pure.

Check (from a profile) + Case (one layer on one GPU) -> why it does not hold, with the numbers; None: it holds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from gateway.core.model.scheme import Kind, LinearShape, MoeShape, Scheme
from gateway.domain import Value

__all__ = ["Case", "Check", "Kind", "LinearShape", "MoeShape", "Scheme", "first_refusal", "numbers", "of_family", "refusal"]


@dataclass(frozen=True)
class Case:
    """One layer on one GPU, with what is installed and what the user disabled; `activation` is how the path quantizes them.

    Of experts `shape` is one of their two products.
    """

    shape: LinearShape
    capability: str
    packages: frozenset[str]
    disabled: frozenset[str]
    activation: str = ""
    experts: MoeShape | None = None
    variables: frozenset[str] = frozenset()  # environment variables that are on

    @property
    def full_k(self) -> int:
        return self.shape.full_k or self.shape.k


class Check(Value):
    """Conditions, all of which must hold. Capabilities are "9.0" or, for a family, "12.*"."""

    when: Check | None = None  # the others apply only where this holds
    any_of: tuple[Check, ...] | None = None
    kinds: tuple[Kind, ...] | None = None
    weight_only: bool | None = None
    static_activation: bool | None = None
    activations: tuple[str, ...] | None = None  # as the path says
    capabilities: tuple[str, ...] | None = None
    min_capability: str | None = None
    below_capability: str | None = None
    package: str | None = None
    enabled: str | None = None  # a kernel that the engine insists on beside the chosen one
    symmetric: bool | None = None
    weights: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    groups: tuple[int, ...] | None = None
    min_group: int | None = None
    group_is_full_k: bool | None = None
    whole_groups: Literal["layer", "rank", "rank unless one group"] | None = None
    act_order: Literal["no", "yes", "unsharded"] | None = None
    k_multiple: int | None = None
    n_multiple: int | None = None
    n_packs: bool | None = None  # n is a multiple of the weights in 32 bits
    full_k_multiple: int | None = None  # of the layer before ranks cut it
    full_n_multiple: int | None = None
    cut_multiple: int | None = None  # what ranks cut: inputs, or the outputs of each module; these too where several are merged
    min_k: int | None = None
    min_n: int | None = None
    bits: tuple[int, ...] | None = None
    variable: str | None = None
    origins: tuple[str, ...] | None = None
    layouts: tuple[str, ...] | None = None
    # of experts alone
    functions: tuple[str, ...] | None = None
    gated: bool | None = None
    bias: bool | None = None
    ep: bool | None = None
    tp_above: int | None = None
    routings: tuple[str, ...] | None = None
    families: tuple[str, ...] | None = None
    not_families: tuple[str, ...] | None = None
    hidden_multiple: int | None = None
    intermediate_multiple: int | None = None
    min_intermediate: int | None = None
    max_experts: int | None = None
    whole_expert_groups: bool | None = None
    halved_groups: int | None = None

    @cached_property
    def tests(self) -> tuple[tuple[Callable[[Any, Case], str], Any], ...]:
        """What is asked for: the function that tests it, and the value."""
        return tuple((test, wanted) for name, test in _TESTS if (wanted := getattr(self, name)) is not None)


def refusal(check: Check, case: Case) -> str | None:
    """Why the check does not hold; None: it does."""
    if check.when is not None and refusal(check.when, case) is not None:
        return None
    for test, wanted in check.tests:
        reason = test(wanted, case)
        if reason:
            return reason
    return None


def first_refusal(checks: Iterable[Check], case: Case) -> str | None:
    """Why the first of them that does not hold does not; None: all hold."""
    for check in checks:
        if reason := refusal(check, case):
            return reason
    return None


@lru_cache(maxsize=64)
def numbers(capability: str) -> tuple[int, int] | None:
    major, _, minor = capability.partition(".")
    return (int(major), int(minor)) if (major + minor).isascii() and major.isdigit() and minor.isdigit() else None


def of_family(capability: str, wanted: Iterable[str]) -> bool:
    return any(capability == one or one == f"{capability.partition('.')[0]}.*" for one in wanted)


# --- one function a condition: what is wanted and the case -> why not, in words with the numbers; "": it holds ---


def _any_of(wanted: tuple[Check, ...], case: Case) -> str:
    reasons = [refusal(check, case) for check in wanted]
    return "" if None in reasons else " and ".join(reason for reason in reasons if reason)


def _capabilities(wanted: tuple[str, ...], case: Case) -> str:
    here = of_family(case.capability, wanted)
    return "" if here else f"runs on compute capability {_or(wanted)}, this GPU has {case.capability}"


def _min_capability(wanted: str, case: Case) -> str:
    enough = (numbers(case.capability) or (0, 0)) >= (numbers(wanted) or (0, 0))
    return "" if enough else f"needs compute capability {wanted} or higher, this GPU has {case.capability}"


def _below_capability(wanted: str, case: Case) -> str:
    below = _min_capability(wanted, case)
    return "" if below else f"is for GPUs below compute capability {wanted}, this one has {case.capability}"


def _package(wanted: str, case: Case) -> str:
    return "" if wanted in case.packages else f"the package {wanted} is not installed"


def _enabled(wanted: str, case: Case) -> str:
    return f"the engine also wants {wanted}, which VLLM_DISABLED_KERNELS disables" if wanted in case.disabled else ""


def _one_of(name: str, read: Callable[[Case], Any]) -> Callable[[Any, Case], str]:
    def test(wanted: Any, case: Case) -> str:
        value = read(case)
        return "" if value in wanted else f"takes {name} {_or(wanted)}, not {value}"

    return test


@lru_cache(maxsize=1024)
def _or(wanted: tuple[Any, ...]) -> str:
    return " or ".join(map(str, wanted))


def _is(name: str, read: Callable[[Case], bool]) -> Callable[[bool, Case], str]:
    def test(wanted: bool, case: Case) -> str:
        return "" if read(case) == wanted else f"is {'' if wanted else 'not '}for {name}"

    return test


def _multiple(letter: str, read: Callable[[Case], int]) -> Callable[[int, Case], str]:
    def test(wanted: int, case: Case) -> str:
        over = read(case) % wanted
        return f"{letter}={read(case)} is not a multiple of {wanted} ({over} over)" if over else ""

    return test


def _cut_multiple(wanted: int, case: Case) -> str:
    shape = case.shape
    sizes = [("K", shape.k)] if shape.k < case.full_k else []
    if len(shape.parts) > 1 or shape.n < (shape.full_n or shape.n):
        sizes += [("N", part) for part in shape.parts or (shape.n,)]
    odd = next(((name, size) for name, size in sizes if size % wanted), None)
    return f"{odd[0]}={odd[1]} is not a multiple of {wanted} ({odd[1] % wanted} over)" if odd else ""


def _at_least(letter: str, read: Callable[[Case], int]) -> Callable[[int, Case], str]:
    def test(wanted: int, case: Case) -> str:
        return "" if read(case) >= wanted else f"{letter}={read(case)} is below {wanted}"

    return test


def _n_packs(_: bool, case: Case) -> str:
    # Of bits that do not divide 32, which only several words hold whole: Fraction(32, bits).numerator in gptq.py.
    packs = 32 // math.gcd(32, max(case.shape.scheme.bits, 1))
    return _multiple("N", lambda c: c.shape.n)(packs, case)


def _group_is_full_k(_: bool, case: Case) -> str:
    group = case.shape.scheme.group
    return "" if group == case.full_k else f"group size {group} is not the whole K={case.full_k}"


def _whole_groups(wanted: str, case: Case) -> str:
    group, k, full_k = case.shape.scheme.group, case.shape.k, case.full_k
    if group <= 0 or (wanted == "rank unless one group" and group >= full_k):
        return ""
    value = full_k if wanted == "layer" else k
    return f"K={value} is not a multiple of the group size {group}" if value % group else ""


def _act_order(wanted: str, case: Case) -> str:
    asked = case.shape.scheme.act_order
    if wanted == "yes":
        return "" if asked else "is for layers with act-order"
    if not asked or (wanted == "unsharded" and case.shape.k == case.full_k):
        return ""
    return "cannot do act-order" + (f" on K={case.shape.k} of {case.full_k}" if wanted == "unsharded" else "")


def _variable(wanted: str, case: Case) -> str:
    return "" if wanted in case.variables else f"{wanted}=1 is not set"


def _of_experts(read: Callable[[MoeShape], Any]) -> Callable[[Case], Any]:
    return lambda case: read(case.experts) if case.experts else None


def _not_families(wanted: tuple[str, ...], case: Case) -> str:
    family = case.experts.family if case.experts else ""
    return f"is not used for {family} models" if family in wanted else ""


def _tp_above(wanted: int, case: Case) -> str:
    tp = case.experts.tp if case.experts else 1
    return "" if tp > wanted else f"is for more than {wanted} ranks"


def _max_experts(wanted: int, case: Case) -> str:
    experts = case.experts.experts if case.experts else 0
    return f"takes at most {wanted} experts, not {experts}" if experts > wanted else ""


def _sized(name: str, size: str) -> Callable[[int, Case], str]:
    def test(wanted: int, case: Case) -> str:
        value = getattr(case.experts, size, 0)
        return f"{name} {value} is not a multiple of {wanted}" if value % wanted else ""

    return test


def _min_intermediate(wanted: int, case: Case) -> str:
    value = case.experts.intermediate if case.experts else wanted
    return "" if value >= wanted else f"intermediate size {value} is below {wanted}"


def _whole_expert_groups(_: bool, case: Case) -> str:
    group = case.shape.scheme.group
    return _sized("intermediate size", "intermediate")(group, case) if group > 0 else ""


def _halved_groups(least: int, case: Case) -> str:
    """Groups that do not divide both sizes are halved until they do, down to `least`."""
    group = asked = case.shape.scheme.group
    if case.experts is None or group <= 0:
        return f"takes groups of at least {least}, not one per channel"
    while case.experts.intermediate % group or case.experts.hidden % group:
        group //= 2
        if group < least:
            sizes = f"{case.experts.hidden} and {case.experts.intermediate}"
            return f"no half of the group size {asked} down to {least} divides {sizes}"
    return ""


_TESTS: tuple[tuple[str, Callable[[Any, Case], str]], ...] = (
    ("kinds", _one_of("schemes", lambda c: c.shape.scheme.kind)),
    ("weight_only", _is("weights quantized alone", lambda c: c.shape.scheme.weight_only)),
    ("static_activation", _is("static activation scales", lambda c: c.shape.scheme.static_activation)),
    ("symmetric", _is("symmetric quantization", lambda c: c.shape.scheme.symmetric)),
    ("capabilities", _capabilities),
    ("min_capability", _min_capability),
    ("below_capability", _below_capability),
    ("package", _package),
    ("enabled", _enabled),
    ("activations", _one_of("activations", lambda c: c.activation)),
    ("act_order", _act_order),
    ("weights", _one_of("weights", lambda c: c.shape.scheme.weights)),
    ("dtypes", _one_of("activations in", lambda c: c.shape.dtype)),
    ("groups", _one_of("group size", lambda c: c.shape.scheme.group)),
    ("min_group", _at_least("group size", lambda c: c.shape.scheme.group)),
    ("group_is_full_k", _group_is_full_k),
    ("n_multiple", _multiple("N", lambda c: c.shape.n)),
    ("k_multiple", _multiple("K", lambda c: c.shape.k)),
    ("full_n_multiple", _multiple("N of the whole layer", lambda c: c.shape.full_n or c.shape.n)),
    ("full_k_multiple", _multiple("K of the whole layer", lambda c: c.full_k)),
    ("cut_multiple", _cut_multiple),
    ("n_packs", _n_packs),
    ("min_k", _at_least("K", lambda c: c.shape.k)),
    ("min_n", _at_least("N", lambda c: c.shape.n)),
    ("whole_groups", _whole_groups),
    ("bits", _one_of("weights of bits", lambda c: c.shape.scheme.bits)),
    ("variable", _variable),
    ("origins", _one_of("checkpoints of", lambda c: (c.experts or c.shape).origin)),
    ("layouts", _one_of("weights packed as", lambda c: c.shape.scheme.layout)),
    ("functions", _one_of("the activation function", _of_experts(lambda e: e.function))),
    ("gated", _is("gated experts", _of_experts(lambda e: e.gated))),
    ("bias", _is("experts with bias", _of_experts(lambda e: e.bias))),
    ("ep", _is("expert parallelism", _of_experts(lambda e: e.ep))),
    ("tp_above", _tp_above),
    ("routings", _one_of("routing", _of_experts(lambda e: e.routing))),
    ("families", _one_of("models of", _of_experts(lambda e: e.family))),
    ("not_families", _not_families),
    ("hidden_multiple", _sized("hidden size", "hidden")),
    ("intermediate_multiple", _sized("intermediate size", "intermediate")),
    ("min_intermediate", _min_intermediate),
    ("max_experts", _max_experts),
    ("whole_expert_groups", _whole_expert_groups),
    ("halved_groups", _halved_groups),
    ("any_of", _any_of),
)
