"""Inputs of a model other than text, by its config. Pure."""

from __future__ import annotations

from gateway.domain import ModelSpec
from gateway.models.media import read_media


def inputs(spec: ModelSpec) -> tuple[str, ...]:
    """Kinds of content that a message may have."""
    media = read_media(spec.config)
    return media if spec.task == "transcribe" else ("text", *media)
