"""Which models are asked for the kernels that an engine turns off or on by the model alone: every
model of tests/models, in formats that have several kernels. Shared by question and test."""

from __future__ import annotations

from tests.support.paths import MODELS
from tests.support.versions import VLLM, since

QUANTS = ("fp8-block", "modelopt-nvfp4", "awq")
# Encoders, whose kernels have no switches; the other questions ask for them.
_ENCODERS = {
    "bge-large-en-v1.5",
    "bge-m3",
    "gte-modernbert-base",
    "nomic-embed-text-v1.5",
    "qwen3-embedding-0.6b",
}
# Later versions alone have their classes, or a transformers that reads them.
_SINCE = {
    "gemma-4-26b-a4b": "0.19",
    "gemma-4-31b": "0.19",
    "gemma-4-e4b": "0.19",
    "nemotron-nano-9b-v2": "0.33",
}


def machines(version: str) -> tuple[str, ...]:
    """Blackwell, where versions have such switches; of the first and the last version, since those
    between share their rules."""
    return ("10.0", "12.0") if version in (VLLM[0], VLLM[-1]) else ()


def cases(version: str) -> list[tuple[str, str]]:
    """(model, quantization), on one rank."""
    models = sorted(path.stem for path in MODELS.glob("*.json"))
    return [
        (model, quant)
        for model in models
        for quant in QUANTS
        if since(version, _SINCE.get(model, "0")) and model not in _ENCODERS
    ]
