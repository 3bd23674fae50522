"""Plans of models with adapters."""

from __future__ import annotations

from gateway.domain import Adapter, AdapterLayer, Decision, ModelSpec, Plan
from gateway.profiles.profiles import Profiles
from tests.support.makers import machine, spec, wish
from tests.support.planning import decide

PROFILES = Profiles()


LAYER = AdapterLayer(module="model.layers.*.self_attn.q_proj", inputs=4096, outputs=4096, rank=12)


SQL = Adapter(name="sql", source="org/sql", revision="0" * 40, rank=12, layers=(LAYER,))


def decision(ref: str, *adapters: Adapter, model: ModelSpec | None = None) -> Decision:
    engine = PROFILES.engine(ref)
    return decide(
        model or spec(),
        machine("3090"),
        [engine],
        wish(),
        rules=PROFILES.rules([engine]),
        adapters=adapters,
    )


def make_plan(ref: str, *adapters: Adapter) -> Plan:
    return decision(ref, *adapters).plans[0]
