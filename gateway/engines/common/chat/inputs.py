"""Inputs of a model other than text, by its config. Pure."""

from __future__ import annotations

from gateway.domain import ModelSpec
from gateway.models.media import media_of


def inputs(spec: ModelSpec) -> tuple[str, ...]:
    """Kinds of content that a message may have."""
    media = media_of(spec.config)
    return media if spec.task == "transcribe" else ("text", *media)
