"""Which media of a body an engine would fetch, and which are refused as they are."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.proxy.bodies.media_urls import hosts

URL = "https://media.example/a.png"


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


@pytest.mark.parametrize(
    "body",
    [
        content({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}),
        content({"type": "image_url", "image_url": URL}),
        content({"type": "video_url", "video_url": {"url": URL}}),
        content({"type": "audio_url", "audio_url": {"url": URL}}),
        content({"type": "input_audio", "input_audio": {"data": URL, "format": "wav"}}),
        content({"type": "image", "source": {"type": "url", "url": URL}}),
        content({"type": "tool_result", "content": [{"type": "image", "image": [URL]}]}),
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": URL}]}]},
        {"input": [{"text": "a", "image": URL}]},
        {"input": {"video": URL}},
        {"query": {"content": [{"type": "image_url", "image_url": {"url": URL}}]}},
        {"documents": [{"content": [{"type": "video_url", "video_url": {"url": URL}}]}]},
        {"image_data": [[{"inner": URL}]]},
    ],
)
def test_the_host_of_each_medium_is_found(body: dict[str, Any]) -> None:
    assert hosts(json.dumps(body).encode()) == {"media.example"}
    escaped_body = json.dumps(body).replace("u", "\\u0075").replace("\\\\u0075", "\\u0075")
    assert hosts(escaped_body.encode()) == {"media.example"}
    assert hosts(json.dumps(body).replace("/", "\\/").encode()) == {"media.example"}


@pytest.mark.parametrize("kind", ["url_citation", "search_result", "tool_use", [], {"a": 1}, 7])
@pytest.mark.parametrize("field", ["url", "input", "arguments", "citations"])
def test_no_type_beside_a_url_hides_it(kind: Any, field: str) -> None:
    part = {"type": "image_url", "image_url": {"type": kind, field: URL}}
    assert hosts(json.dumps(content(part)).encode()) == {"media.example"}
    part = {"type": kind, "image_url": URL}
    assert hosts(json.dumps(content(part)).encode()) == {"media.example"}


PLAIN = base64.b64encode(b"\xff\xd8\xff" + bytes(range(256))).decode()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "See http://10.0.0.1/ and file:///etc/x"}]},
        content({"type": "text", "text": "url: http://127.0.0.1/"}),
        content({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
        content({"type": "input_audio", "input_audio": {"data": PLAIN, "format": "wav"}}),
        content({"type": "image", "source": {"type": "base64", "data": PLAIN}}),
        content({"type": "image_url", "image_url": {"url": URL[:0]}, "uuid": "a.b:c"}),
        {"messages": [], "tools": [{"function": {"parameters": {"url": {"default": "file:///"}}}}]},
        {"messages": [], "audio": {"voice": "alloy", "format": "wav"}},
        content({"type": "tool_use", "name": "Fetch", "input": {"url": "http://127.0.0.1/"}}),
        content({"type": "web_search_result", "url": "http://127.0.0.1/"}),
        {"input": [{"type": "function_call", "arguments": '{"url": "http://127.0.0.1/"}'}]},
        content({"type": "output_text", "text": "", "annotations": [{"url": "http://[::1]/"}]}),
        {"prompt": "an image of http://127.0.0.1/"},
        {"input": ["an audio", "a url"]},
    ],
)
def test_texts_tools_and_data_are_left_alone(body: dict[str, Any]) -> None:
    assert hosts(json.dumps(body).encode()) == frozenset()


@pytest.mark.parametrize(
    "medium",
    [
        "file:///a.png",
        "ftp://media.example/a",
        "/a.png",
        "/srv/a",
        "../a",
        "a/../../b",
        "./a.png",
        " https://media.example/",
        "https://user@media.example/",
        "https://media.example\\a",
        "https://",
        "https:///a",
        "https://[::1/",
        "https://media%2eexample/",
        "https://mediä.example/",
        "gopher://a",
    ],
)
@pytest.mark.parametrize("field", ["image_url", "video", "url", "audioUrl"])
def test_another_scheme_and_a_path_are_refused(medium: str, field: str) -> None:
    with pytest.raises(BadRequest, match="is not fetched"):
        hosts(json.dumps(content({"type": "x", field: medium})).encode())


def test_the_number_of_media_hosts_of_a_request_is_limited() -> None:
    parts = [{"type": "image_url", "image_url": f"https://h{n}.example/"} for n in range(40)]
    with pytest.raises(BadRequest, match="40 hosts"):
        hosts(json.dumps(content(*parts)).encode())


@pytest.mark.parametrize(
    "value", ["1e400", "-1e999999", "9" * 5000, '"\\ud800"', "[" * 200_000 + "]" * 200_000, "\xff"]
)
def test_values_that_cannot_be_read_are_the_clients_mistake(value: str) -> None:
    body = f'{{"model": "m", "messages": [], "user": "http://", "x": {value}}}'.encode("latin-1")
    with pytest.raises(BadRequest, match="cannot be read"):
        hosts(body)


def test_deep_nesting_is_read_without_recursion() -> None:
    deep: Any = URL
    for _ in range(300):
        deep = [deep]
    assert hosts(json.dumps({"image": deep}).encode()) == {"media.example"}
