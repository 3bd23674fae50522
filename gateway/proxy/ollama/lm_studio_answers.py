"""Lists of models in the form of LM Studio's REST API. Pure.

Fields: https://lmstudio.ai/docs/developer/rest/endpoints (v0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.proxy.ollama.ollama_answers import LOADED_STATES
from gateway.proxy.routing.model_route import ModelCard

MODELS = "/api/v0/models"


def models(model_list: Mapping[str, Any], facts: Mapping[str, ModelCard]) -> dict[str, Any]:
    """The answer of /api/v0/models. facts: by name."""
    rows = [
        model(card, facts.get(card["id"], ModelCard())) for card in model_list.get("data") or ()
    ]
    return {"object": "list", "data": rows}


def model(card: Mapping[str, Any], facts: ModelCard) -> dict[str, Any]:
    """The answer of /api/v0/models/MODEL. An unknown fact is an empty text, or left out."""
    context = card.get("max_model_len")
    is_loaded = card.get("state") in LOADED_STATES
    return {
        "id": card["id"],
        "object": "model",
        "type": _kind(card),
        "publisher": "",
        "arch": facts.family,
        "compatibility_type": "safetensors",
        "quantization": facts.quantization,
        "state": "loaded" if is_loaded else "not-loaded",
        **({"max_context_length": context} if context else {}),
        **({"loaded_context_length": context} if context and is_loaded else {}),
        "capabilities": ["tool_use"] if card.get("tools") == "proven" else [],
    }


def _kind(card: Mapping[str, Any]) -> str:
    if card.get("task") == "embed":
        return "embeddings"
    return "vlm" if "image" in ((card.get("modalities") or {}).get("input") or ()) else "llm"
