"""The gateway behaves as GET /admin/openapi.json says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.proxy.access.scopes import SCOPES
from gateway.proxy.api.endpoints import ENDPOINTS
from tests.support.description_cases import RAW, ask_cases, asked_gateway
from tests.support.running import running

# For people, and the description itself.
PAGES = {
    "/",
    "/page/{version}/{name:path}",
    "/admin/docs",
    "/admin/openapi.json",
    "/auth/login",
    "/auth/callback",
}


def test_all_answers_of_the_gateway_are_described(tmp_path: Path) -> None:
    with asked_gateway(tmp_path) as gateway:
        rows = ask_cases(gateway, cases=250, seed=1, count=3)
        log = gateway.log.read_text(errors="replace")
    assert {label: row.breaches for label, row in rows.items() if row.breaches} == {}
    assert "Traceback" not in log
    routes = {
        f"{method} {path.replace(':path}', '}')}" for method, path in SCOPES if path not in PAGES
    }
    assert rows.keys() >= routes | {f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS}
    assert all(row.statuses.total() for row in rows.values())
    assert {status for row in rows.values() for status in row.statuses} >= {200, 201, 202, 400, 404}


@pytest.mark.anyio
async def test_a_body_that_nobody_can_read_is_a_bad_request(tmp_path: Path) -> None:
    async with running(tmp_path, lambda spec: pytest.fail(spec.model)) as gateway:
        for body, kind in RAW:
            headers = [] if kind is None else [(b"content-type", kind.encode("latin-1"))]
            for path in ("/admin/keys", "/admin/plan", "/admin/pull", "/admin/facts"):
                answer = await gateway.client.post(path, content=body, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    400,
                    "bad_request",
                ), (path, body[:50], kind)


@pytest.mark.anyio
@pytest.mark.parametrize("number", [0, -1, 2**63, -(2**80)])
async def test_a_number_that_no_fact_has_is_refused(tmp_path: Path, number: int) -> None:
    async with running(tmp_path, lambda spec: pytest.fail(spec.model)) as gateway:
        assert (await gateway.client.delete(f"/admin/facts/{number}")).status_code == 400
        assert (await gateway.client.delete(f"/admin/facts/{2**63 - 1}")).status_code == 404


@pytest.mark.anyio
async def test_a_base_url_without_its_prefix_is_explained(tmp_path: Path) -> None:
    async with running(tmp_path, lambda spec: pytest.fail(spec.model)) as gateway:
        for path in ("/chat/completions", "/models/m"):
            answer = await gateway.client.post(path, json={"model": "m", "messages": []})
            assert answer.status_code == 404
            assert "The base URL of a client ends in /v1" in answer.json()["error"]["message"]
        response = await gateway.client.get("/nowhere")
        assert "ends in /v1" not in response.json()["error"]["message"]
