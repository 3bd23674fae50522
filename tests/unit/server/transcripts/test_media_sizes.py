"""Media and vectors in requests: sizes in their place."""

from __future__ import annotations

import base64

from gateway.server.transcripts.media_sizes import drop_media

IMAGE = base64.b64encode(bytes(range(256)) * 12).decode()


def test_a_size_replaces_an_image_and_a_sound() -> None:
    message = {
        "content": [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
            {"type": "input_audio", "input_audio": {"data": IMAGE, "format": "wav"}},
            {"type": "text", "text": "what is it?"},
        ]
    }
    short_message = drop_media(message)
    image, sound, text = short_message["content"]
    assert image["image_url"]["url"] == "[image/png: 3,072 bytes]"
    assert sound["input_audio"] == {"data": "[base64: 3,072 bytes]", "format": "wav"}
    assert text["text"] == "what is it?"


def test_a_count_replaces_a_vector_but_not_a_short_list() -> None:
    assert drop_media({"embedding": [0.5] * 1024}) == {"embedding": "[1,024 numbers]"}
    assert drop_media([1, 2, 3]) == [1, 2, 3]


def test_a_long_prose_text_stays() -> None:
    prose = "a word and another " * 200
    assert drop_media(prose) == prose
