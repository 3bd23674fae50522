"""Answers of the admin API about routes that it does not have."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from gateway.server.error_answers import answer_errors


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/running", "fitserve ps"),
        ("/unload", "fitserve unload NAME"),
        ("/unload/m", "fitserve unload NAME"),
        ("/api/models/unload/m", "fitserve unload NAME"),
        ("/logs/stream/m", "fitserve logs NAME"),
        ("/v1-openai/models/m", "http://HOST:PORT/v1"),
        ("/server_info", "fitserve show NAME"),
        ("/dashboard", "The page is at /"),
        ("/runningx", "GET /admin/openapi.json"),
    ],
)
def test_routes_of_other_programs_are_answered_with_ours(path: str, words: str) -> None:
    api = FastAPI()
    answer_errors(api)
    answer = TestClient(api).get(path)
    assert answer.status_code == 404
    assert words in answer.json()["error"]["message"]
