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
    ("field", "value", "words"),
    [
        ("max_model_len", 1, "max_model_len: there is no such field (did you mean context?)."),
        ("contxt", 1, "contxt: there is no such field (did you mean context?)."),
        ("zzz", 1, "zzz: there is no such field."),
        ("gpus", "some", "gpus: must be 'all' or 'few' or a whole number or a list."),
        ("replicas", 0, "replicas: must be at least 1."),
        ("goal", "thruput", "or 'agents' (did you mean throughput?)."),
        ("dtype", "fp16", "or 'float32' (did you mean float16?)."),
        ("name", None, "name: must be a text."),
    ],
)
def test_a_wrong_field_of_a_body_is_refused_in_our_words_with_the_near_ones(
    field: str, value: object, words: str
) -> None:
    api = FastAPI()
    answer_errors(api)

    @api.post("/models")
    def add(body: ModelRequest) -> None:
        raise AssertionError(body)

    answer = TestClient(api).post("/models", json={"name": "m", "source": "org/m", field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert words in answer.json()["error"]["message"]


def test_a_field_within_a_field_has_the_near_one_of_its_own_kind() -> None:
    api = FastAPI()
    answer_errors(api)

    @api.post("/models")
    def add(body: ModelRequest, limit: int) -> None:
        raise AssertionError(body, limit)

    fields = {"name": "m", "source": "org/m", "policy": {"keep_aliv": 5}}
    error = TestClient(api).post("/models?limit=1", json=fields).json()["error"]
    assert error["param"] == "policy.keep_aliv"
    assert "there is no such field (did you mean keep_alive?)." in error["message"]
    error = TestClient(api).post("/models?limit=x", json={"name": "m"}).json()["error"]
    assert error["message"].startswith("limit: must be a whole number.")
    error = TestClient(api).post("/models?limit=1").json()["error"]
    assert error["message"].startswith("body: is missing.")
