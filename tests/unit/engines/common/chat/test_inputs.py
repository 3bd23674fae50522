"""A model's inputs beside text stand in its config."""

from __future__ import annotations

import pytest

from gateway.engines.common.chat.inputs import inputs
from tests.support.published import published_model


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama-3.1-8b", ("text",)),
        ("gemma-3-27b", ("text", "image")),
        ("qwen3.5-9b", ("text", "image", "video")),
        ("mistral-small-3.2-24b", ("text", "image")),
        ("gemma-4-e4b", ("text", "image", "video", "audio")),
    ],
)
def test_a_config_tells_the_parts_of_a_message(name: str, kinds: tuple[str, ...]) -> None:
    assert inputs(published_model(name)) == kinds
