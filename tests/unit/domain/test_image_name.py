"""Which images may be started is read from their names as Docker reads them."""

from __future__ import annotations

import re

import pytest

from gateway.domain.image_name import (
    NAME_PATTERN,
    AllowedImages,
    add_tag,
    is_digest_of,
    repository,
)
from gateway.profiles.profiles import Profiles
from tests.support.versions import NEWEST_VLLM

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("vllm/vllm-openai", "vllm/vllm-openai"),
        (f"vllm/vllm-openai:v{NEWEST_VLLM}", "vllm/vllm-openai"),
        (f"docker.io/vllm/vllm-openai:v{NEWEST_VLLM}@{DIGEST}", "vllm/vllm-openai"),
        ("index.docker.io/library/vllm", "vllm"),
        ("library/vllm:1", "vllm"),
        ("library/vllm/vllm-openai:1", "library/vllm/vllm-openai"),
        ("docker.io/docker.io/vllm/vllm-openai", "docker.io/vllm/vllm-openai"),
        ("localhost:5000/vllm:1", "localhost:5000/vllm"),
        ("localhost:5000/vllm", "localhost:5000/vllm"),
        (DIGEST, DIGEST),
    ],
)
def test_a_repository_is_the_name_without_tag_digest_and_dockers_prefix(
    image: str, name: str
) -> None:
    assert repository(image) == name


@pytest.mark.parametrize(
    ("patterns", "image", "allowed"),
    [
        ("vllm/vllm-openai", "vllm/vllm-openai:nightly", True),
        ("vllm/vllm-openai", f"vllm/vllm-openai@{DIGEST}", True),
        ("vllm/vllm-openai", "docker.io/vllm/vllm-openai", True),
        ("docker.io/vllm/vllm-openai", "vllm/vllm-openai:v1", True),
        ("vllm/vllm-openai", "evil/vllm/vllm-openai:v1", False),
        ("vllm/vllm-openai", "library/vllm/vllm-openai:v1", False),
        ("vllm/vllm-openai", "vllm/vllm-openai-evil", False),
        ("vllm/vllm-openai", "vllm/vllm-openaix", False),
        ("vllm.vllm-openai", "vllm/vllm-openai", False),
        ("my/vllm:1", "my/vllm:1", True),
        ("my/vllm:1", f"my/vllm:1@{DIGEST}", True),
        ("my/vllm:1", "my/vllm:2", False),
        ("my/vllm:1", f"my/vllm@{DIGEST}", False),
        ("my/vllm:latest", "my/vllm", True),
        (f"my/vllm@{DIGEST}", f"my/vllm@{DIGEST}", True),
        ("registry.example:5000/*", "registry.example:5000/team/vllm:1", True),
        ("registry.example:5000/*", "registry.example/team/vllm:1", False),
        (" vllm/vllm-openai , my/vllm:* ", "my/vllm:x", True),
        ("", "vllm/vllm-openai", False),
        ("*", "anything/there/is:1", True),
        ("*", DIGEST, False),
        ("*", "0" * 12, False),
        (DIGEST, DIGEST, True),
        ("*", "a b", False),
        ("*", "a\n", False),
        ("*", "--privileged", False),
        ("*", "", False),
        ("*", "../vllm", False),
    ],
)
def test_a_pattern_allows_a_repository_or_a_name_whole(
    patterns: str, image: str, *, allowed: bool
) -> None:
    images = AllowedImages(patterns.split(","))
    assert images.allows(image) is allowed
    message, hint = images.refusal(image)
    assert repr(image[:200]) in message
    assert "FITSERVE_ALLOWED_IMAGES" in hint


def test_a_digest_belongs_to_its_repository() -> None:
    assert is_digest_of(DIGEST, "my/vllm:1")
    assert is_digest_of(f"my/vllm@{DIGEST}", "docker.io/my/vllm:1")
    for wrong in (f"other/vllm@{DIGEST}", "my/vllm:1", "sha256:0", f"{DIGEST}\n", f"@{DIGEST}", ""):
        assert not is_digest_of(wrong, "my/vllm:1")


def test_a_name_without_a_tag_cannot_be_read_as_an_id() -> None:
    assert [add_tag(name) for name in ("abcdef", "h:5000/a", "a:1", f"a@{DIGEST}")] == [
        "abcdef:latest",
        "h:5000/a:latest",
        "a:1",
        f"a@{DIGEST}",
    ]


def test_the_images_of_all_shipped_engines_are_allowed_and_no_others() -> None:
    profiles = Profiles()
    images = profiles.allowed_images(None)
    assert set(images.patterns) == {"vllm/vllm-openai", "lmsysorg/sglang", "fitserve/vllm-cpu"}
    assert all(images.allows(image) and re.match(NAME_PATTERN, image) for image in profiles.images)
    assert not images.allows("somebody/vllm-openai:v1")
    assert profiles.allowed_images("my/*").patterns == ("my/*",)
