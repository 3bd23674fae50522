"""Inputs of a model beside text, by its config. Pure."""

from __future__ import annotations

from gateway.domain import ModelSpec

# Keys of the configs of transformers 5 for each kind of input (tests/models has some). A model
# without such a key reads only text.
_HELD = {
    "image": ("vision_config", "image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index", "video_placeholder"),
    "audio": ("audio_config", "audio_token_id", "audio_token_index"),
}


def inputs(spec: ModelSpec) -> tuple[str, ...]:
    """Kinds of content that a message may have."""
    return (
        "text",
        *(
            kind
            for kind, names in _HELD.items()
            if any(spec.config.get(name) is not None for name in names)
        ),
    )
