"""Lists of models in LM Studio's form."""

from gateway.proxy.ollama.lm_studio_answers import model, models
from gateway.proxy.routing.model_route import ModelCard

CARD = {"id": "m", "state": "ready", "task": "generate", "max_model_len": 4096, "tools": "proven"}


def test_models_have_kind_state_and_context() -> None:
    vision = {**CARD, "id": "v", "modalities": {"input": ["text", "image"]}, "tools": "unknown"}
    embeds = {**CARD, "id": "e", "task": "embed", "state": "stopped", "tools": "not proven"}
    facts = {"m": ModelCard(family="llama", quantization="BF16")}
    rows = models({"data": [CARD, vision, embeds]}, facts)["data"]
    assert [(row["id"], row["type"], row["state"], row["capabilities"]) for row in rows] == [
        ("m", "llm", "loaded", ["tool_use"]),
        ("v", "vlm", "loaded", []),
        ("e", "embeddings", "not-loaded", []),
    ]
    assert (rows[0]["arch"], rows[0]["quantization"]) == ("llama", "BF16")
    assert (rows[0]["loaded_context_length"], rows[2]["max_context_length"]) == (4096, 4096)
    assert "loaded_context_length" not in rows[2]


def test_an_unknown_context_is_left_out() -> None:
    row = model({"id": "x", "state": "ready", "max_model_len": None}, ModelCard())
    assert "max_context_length" not in row
