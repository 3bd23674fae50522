"""The memory of adapters: counted here by hand from the shapes of Llama 3.1 8B."""

from __future__ import annotations

from gateway.engines.common.layers.build import build
from gateway.engines.common.lora.adapter_memory import bytes_on_rank
from gateway.engines.registry import engine_kind
from tests.support.adapter_plans import PROFILES, SQL, make_plan
from tests.support.makers import spec
from tests.support.versions import VLLM_REF


def test_room_is_made_in_every_layer_for_any_adapter() -> None:
    # Llama 3.1 8B: inputs of each merged part and outputs, of qkv, o, gate and up, down; and
    # embedding and head.
    layer = (3 * 4096 + 6144) + (4096 + 4096) + (2 * 4096 + 28672) + (14336 + 4096)
    numbers = 32 * layer + 2 * (128256 + 4096)
    model, engine = spec(), PROFILES.engine(VLLM_REF)
    kind = engine_kind(engine.kind)
    model_layers = build(model, frozenset(engine.traits))
    assert bytes_on_rank(engine, kind, (SQL,), model_layers, model, 1) == numbers * 16 * 2
    assert bytes_on_rank(engine, kind, (SQL, SQL), model_layers, model, 1) == 2 * numbers * 16 * 2
    assert bytes_on_rank(engine, kind, (SQL,), model_layers, model, 2) < numbers * 16 * 2
    plan, without = make_plan(VLLM_REF, SQL), make_plan(VLLM_REF)
    assert plan.memory.weights_bytes - without.memory.weights_bytes == numbers * 16 * 2
    assert plan.memory.kv_bytes < without.memory.kv_bytes
