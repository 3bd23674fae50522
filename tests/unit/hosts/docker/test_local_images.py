"""Words about an image that Docker does not have."""

from __future__ import annotations

import pytest

from gateway.hosts.docker.local_images import image_hint


@pytest.mark.parametrize(
    ("image", "cures"),
    [
        ("fitserve/vllm-cpu:0.32.0", ("docker compose build", "FITSERVE_HOST_KIND=process")),
        ("vllm/vllm-openai:v0.33.0", ("docker pull vllm/vllm-openai:v0.33.0", "docker login")),
    ],
)
def test_an_image_is_built_or_pulled_or_not_needed(image: str, cures: tuple[str, ...]) -> None:
    hint = image_hint(image)
    assert all(cure in hint for cure in cures)
