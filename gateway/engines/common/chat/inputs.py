"""What a model takes beside text, by its config. Pure."""

from __future__ import annotations

from gateway.domain import ModelSpec

# What configs of transformers 5 hold for each kind (tests/models has some of them). Where none
# stands, the model reads text alone.
_HELD = {
    "image": ("vision_config", "image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index", "video_placeholder"),
    "audio": ("audio_config", "audio_token_id", "audio_token_index"),
}


def inputs(spec: ModelSpec) -> tuple[str, ...]:
    """Kinds of what a message may hold."""
    return (
        "text",
        *(
            kind
            for kind, names in _HELD.items()
            if any(spec.config.get(name) is not None for name in names)
        ),
    )
