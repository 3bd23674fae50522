"""Flags of both engines limit media alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.engines.common.media_limits import media_limit


@pytest.mark.parametrize(
    ("limits", "images"),
    [
        ({"image": 0}, 0),
        ({"image": 3, "video": 0}, 3),
        ({"image": {"count": 0}}, 0),
        ({"image": {"count": 2, "width": 512}}, 2),
        ({"image": {"width": 512}}, None),
        ({"image": "0"}, None),
        ({"image": True}, None),
        ({"video": 0}, None),
    ],
)
@pytest.mark.parametrize("flag", ["limit-mm-per-prompt", "limit-mm-data-per-request"])
def test_a_limit_is_a_number_or_an_object_with_a_count(
    flag: str, limits: dict[str, Any], images: int | None
) -> None:
    assert media_limit({flag: json.dumps(limits)}, "image") == images


def test_a_text_only_flag_allows_no_media() -> None:
    assert media_limit({"language-model-only": True}, "image") == 0
    assert media_limit({"language-model-only": "true"}, "video") == 0
    assert media_limit({"language-model-only": False}, "image") is None
    assert media_limit({}, "image") is None
