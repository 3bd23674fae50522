"""The memory settings that SGLang derives are those of the planner."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engines.sglang.memory import ModelTraits, static_memory
from tests.conformance import sglang_memory_questions
from tests.conformance.golden import golden
from tests.support.versions import SGLANG
from tests.unit.engines.sglang.test_memory import MEMORY


def model_of(config: dict[str, Any]) -> ModelTraits:
    vision = config.get("vision_config") or {}
    return ModelTraits(
        architecture=config["architectures"][0],
        uses_mla="kv_lora_rank" in config,
        has_towers="text_config" in config or "vision_config" in config,
        has_vision="vision_config" in config,
        vision_layers=vision.get("num_hidden_layers"),
        vision_hidden=vision.get("hidden_size"),
    )


@pytest.mark.parametrize("version", SGLANG)
def test_memory_settings_are_the_engines_own(version: str) -> None:
    models = {
        name: model_of(sglang_memory_questions.config_of(name))
        for name in sglang_memory_questions.NAMES
    }
    wrong = []
    for capability, answers in golden(sglang_memory_questions, version).items():
        for question, answer in zip(
            sglang_memory_questions.questions(version), answers, strict=True
        ):
            name, mib, tp, seqs, eager, graphs = question
            memory = static_memory(
                MEMORY[version],
                mib,
                models[name],
                tp=tp,
                seqs=seqs,
                graphs=graphs,
                is_eager=eager,
            )
            if [
                memory.chunked_prefill,
                memory.graph_batch,
                pytest.approx(memory.fraction, abs=1e-5),
            ] != answer:
                wrong.append((capability, question, answer, memory))
    assert wrong == []
