"""The access log of the admin API, of one process and of several."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.support.patience import hang_s
from tests.support.served import serve_models

ADMIN, API = "admin-canary-of-this-test-1", "api-canary-of-this-test-22"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_each_call_of_the_admin_api_is_reported_without_secrets(
    tmp_path: Path, workers: str
) -> None:
    settings = {"FITSERVE_API_KEY": API, "FITSERVE_ACCESS_LOG": "true", "FITSERVE_WORKERS": workers}
    with (
        serve_models(tmp_path, {}, ADMIN, **settings) as gateway,
        httpx.Client(base_url=gateway.url, trust_env=False, timeout=hang_s()) as client,
    ):

        def call(method: str, path: str, key: str, **more: object) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
            return client.request(method, path, headers=headers, **more)  # type: ignore[arg-type]

        new_key = call("POST", "/admin/keys", ADMIN, json={"name": "app"}).json()["key"]
        call("GET", "/admin/keys?key=canary", ADMIN)
        call("DELETE", f"/admin/keys/{new_key}", ADMIN)  # instead of its name
        call("DELETE", "/admin/keys/app", ADMIN)
        call("GET", "/admin/canary", ADMIN)
        call("GET", "/admin/models", API)
        call("GET", "/metrics", "canary-of-a-wrong-key")
        response = client.get("/admin/models")
        client.get("/healthz")
    lines = [json.loads(line) for line in gateway.log.splitlines() if '"event":"admin"' in line]
    names = ("method", "route", "path", "status", "key", "id")
    assert [tuple(line[name] for name in names) for line in lines] == [
        ("POST", "/admin/keys", "/admin/keys", 201, "admin", "mine"),
        ("GET", "/admin/keys", "/admin/keys", 200, "admin", "mine"),
        ("DELETE", "/admin/keys/{name}", None, 404, "admin", "mine"),
        ("DELETE", "/admin/keys/{name}", "/admin/keys/app", 200, "admin", "mine"),
        ("GET", "", None, 404, "admin", "mine"),
        ("GET", "/admin/models", None, 403, None, "mine"),
        ("GET", "/metrics", None, 401, None, "mine"),
        ("GET", "/admin/models", None, 401, None, response.headers["x-request-id"]),
    ]
    assert {line["address"] for line in lines} == {"127.0.0.1"}
    assert all(line["sent_bytes"] > 0 and line["duration_s"] >= 0 for line in lines)
    assert not [secret for secret in ("canary", new_key) if secret in gateway.log]
