"""Answers of the admin API about routes that it does not have."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from gateway.server.error_answers import answer_errors
from gateway.wishes.model_request import ModelRequest


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


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("max_model_len", "max_model_len: there is no such field (did you mean context?)."),
        ("contxt", "contxt: there is no such field (did you mean context?)."),
        ("zzz", "zzz: there is no such field."),
    ],
)
def test_an_unknown_field_of_a_body_leads_to_the_field_that_was_meant(
    field: str, words: str
) -> None:
    api = FastAPI()
    answer_errors(api)

    @api.post("/models")
    def add(body: ModelRequest) -> None:
        raise AssertionError(body)

    answer = TestClient(api).post("/models", json={"name": "m", "source": "org/m", field: 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert words in answer.json()["error"]["message"]
