"""A default is never told as a reading: every field that a plan names stands in the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain import Decision, ModelSpec
from gateway.errors import BadModel
from gateway.planner import explain
from gateway.profiles.profiles import Profiles
from tests.support.makers import machine, wish
from tests.support.paths import MODELS
from tests.support.planning import decide
from tests.support.published import config, model_from_config
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()
ENGINES = [PROFILES.engine(ref) for ref in (VLLM_REF, SGLANG_REF, "vllm==0.19.1")]
RULES = PROFILES.rules(ENGINES)
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
_CLAIM = re.compile(r"(\w+) in config\.json")


def texts(decision: Decision) -> Iterator[str]:
    for plan in decision.plans:
        for row in explain.choices(plan):
            yield row.reason
        yield from plan.warnings
    for rejection in decision.rejected:
        yield from rejection.reasons
        yield rejection.source


def blocks_of(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from blocks_of(inner)


def read(fields: dict[str, Any]) -> ModelSpec:
    return model_from_config(fields)


@settings(max_examples=150)
@given(st.data())
def test_a_plan_names_only_fields_that_the_file_has(data: st.DataObject) -> None:
    fields = config(data.draw(st.sampled_from(NAMES)))
    present = sorted({key for block in blocks_of(fields) for key in block})
    for key in data.draw(st.sets(st.sampled_from(present), max_size=4)):
        for block in blocks_of(fields):
            block.pop(key, None)
    try:
        spec = read(fields)
    except BadModel:
        return
    wish_for_text = wish(tensor_parallel=data.draw(st.sampled_from([1, 2])), text_only=True)
    decision = decide(
        spec, machine("8xh100"), ENGINES, wish_for_text, rules=RULES, gpus=PROFILES.gpus
    )
    names = {
        key for block in blocks_of(fields) for key, value in block.items() if value is not None
    }
    for text in texts(decision):
        for claim in _CLAIM.findall(text):
            assert claim in names, text
        if text.endswith("(config.json)"):
            assert "quantization" in " ".join(names) or "not quantized" in text, text


def test_defaults_are_called_defaults() -> None:
    spec = read(config("llama-3.1-8b", max_position_embeddings=None, torch_dtype=None, dtype=None))
    plans = decide(spec, machine("8xh100"), ENGINES[:1], wish(), rules=RULES).plans
    plan = next(plan for plan in plans if plan.tensor_parallel.value > 1)
    assert plan.max_model_len.source == "transformers' default of max_position_embeddings for llama"
    assert plan.dtype.reason == "no file names a dtype, and the engine itself would choose this"
    assert plan.tensor_parallel.source == "num_attention_heads in config.json"
