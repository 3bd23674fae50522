"""Layers and their kernels of SGLang."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from gateway.engines.common.kernels.expert_kernels import MoeChoice, MoeRules, choose_moe
from gateway.engines.common.kernels.linear import LinearRules
from gateway.engines.common.layers.build import build
from gateway.engines.common.layers.built_model import Linear
from gateway.models.experts import ExpertTraits, expert_traits
from gateway.models.scheme import MoeShape, Scheme
from gateway.profiles.profiles import Profiles
from tests.support.published import published_model
from tests.support.versions import SGLANG

PROFILES = Profiles()


ENGINES = {version: PROFILES.engine(f"sglang=={version}") for version in SGLANG}


RULES = {version: PROFILES.rules([ENGINES[version]])[f"sglang=={version}"] for version in SGLANG}


def linear(version: str) -> LinearRules:
    rules = RULES[version].linear
    assert rules is not None
    return rules


def moe(version: str) -> MoeRules:
    rules = RULES[version].moe
    assert rules is not None
    return rules


def scheme_of(q: Any) -> Scheme:
    layout: Any = {"gptq": "gptq", "awq": "awq", "auto-round": "gptq"}.get(q.origin, "")
    fields = {
        name: getattr(q, name)
        for name in ("kind", "bits", "group", "symmetric", "act_order", "weight_only")
    }
    return Scheme(**fields, static_activation=q.static, layout=layout)


class Experts(NamedTuple):
    traits: ExpertTraits
    gate_up: Linear


@cache
def experts(name: str) -> Experts:
    spec = published_model(name)
    return Experts(
        expert_traits(spec),
        next(
            layer for layer in build(spec).linears if layer.experts and layer.name.endswith(".w13")
        ),
    )


def moe_choice(version: str, q: Any, capability: str, runner: str | None = None) -> MoeChoice:
    """runner: --moe-runner-backend."""
    return moe_choice_by(moe(version), q, capability, runner)


def moe_choice_by(rules: MoeRules, q: Any, capability: str, runner: str | None = None) -> MoeChoice:
    traits, layer = experts(q.model)
    has_gate = not traits.function.endswith("_no_mul")
    shape = MoeShape(
        hidden=layer.k,
        intermediate=layer.n // (2 if has_gate else 1) // (1 if q.ep > 1 else q.tp),
        experts=layer.experts,
        scheme=scheme_of(q),
        origin="" if q.origin == "none" else q.origin,
        dtype=q.dtype,
        function=traits.function,
        bias=layer.bias,
        routing=traits.routing,
        family=traits.family,
        ep=q.ep > 1,
    )
    return choose_moe(rules, shape, capability, forced_backend=runner)
