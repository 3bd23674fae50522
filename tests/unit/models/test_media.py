"""The inputs of a model beside text, by its architecture or the fields of its config."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.models.media import read_media


@pytest.mark.parametrize(
    ("config", "media"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ()),
        ({"architectures": ["WhisperForConditionalGeneration"]}, ("audio",)),
        ({"architectures": ["Qwen2AudioForConditionalGeneration"]}, ("audio",)),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, ("image", "video")),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, ("image",)),
        ({"architectures": ["Phi4MMForCausalLM"]}, ("image", "audio")),
        # Its audio depends on the config: the larger models have no audio tower.
        ({"architectures": ["Gemma4ForConditionalGeneration"]}, ("image", "video")),
        (
            {"architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None},
            ("image", "video"),
        ),
        (
            {"architectures": ["Gemma4ForConditionalGeneration"], "audio_config": {"a": 1}},
            ("image", "video", "audio"),
        ),
        ({"architectures": ["UnheardOf"], "vision_config": {"depth": 1}}, ("image",)),
        ({"architectures": ["UnheardOf"], "thinker_config": {"audio_config": {}}}, ("audio",)),
        ({"architectures": ["UnheardOf"], "image_token_id": 0}, ("image",)),
        ({"architectures": ["UnheardOf"], "vision_config": None}, ()),
        ({}, ()),
    ],
)
def test_a_config_names_its_media(config: dict[str, Any], media: tuple[str, ...]) -> None:
    assert read_media(config) == media
