"""LoRA adapters with the real engine: loaded at the start, listed and asked as models, there again
after a start without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli.demo.checkpoint import SENTENCE, make_model
from tests.e2e.conftest import START_S, Gateway
from tests.support.adapters import make_adapter
from tests.support.sdk_calls import openai_client

pytestmark = pytest.mark.engine


def test_adapters_answer_as_models_of_their_own(gateway: Gateway, tmp_path: Path) -> None:
    make_model(tmp_path / "base")
    adapter = make_adapter(tmp_path / "one", tmp_path / "base", seed=1)
    two = make_adapter(tmp_path / "two", tmp_path / "base", rank=4, seed=2)
    loras = ("--lora", f"one={adapter}", "--lora", f"team/two:v1={two}")
    result = gateway.cli("add", "base", str(tmp_path / "base"), "--engine", "vllm-cpu", *loras)
    assert result.returncode == 0, result.stderr
    view = gateway.until("base", "ready", START_S)
    plan = view["plan"]
    assert plan["loras"]["value"] == "one (rank 8), team/two:v1 (rank 4)"
    assert {"--enable-lora", "--max-lora-rank=8", "--max-loras=2"} <= set(plan["argv"])
    models = {model["id"]: model for model in gateway.client.get("/v1/models").json()["data"]}
    assert (models["one"]["parent"], models["one"]["root"], models["one"]["state"]) == (
        "base",
        str(adapter),
        "ready",
    )
    assert "parent" not in models["base"]
    with openai_client(gateway.url) as client:
        answers = {
            name: client.completions.create(model=name, prompt="Hi", max_tokens=12, temperature=0)
            for name in ("base", "one", "team/two:v1")
        }
    assert answers["base"].choices[0].text.strip() in SENTENCE
    assert len({answer.choices[0].text for answer in answers.values()}) == 3, answers
