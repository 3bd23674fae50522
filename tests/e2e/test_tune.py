"""The search for a faster plan with the real engine: trials beside the model, which goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import START_S, Gateway, wait_for

pytestmark = pytest.mark.engine


def test_the_real_engine_is_measured_beside_the_served_one_which_stays(
    serving_demo: Gateway,
) -> None:
    gateway = serving_demo
    before = gateway.show("demo")
    # One request at once keeps the measurement short.
    response = gateway.client.patch("/admin/models/demo", json={"concurrency": 1})
    assert response.status_code in (200, 202), response.text
    gateway.until("demo", "ready", START_S)
    reply = gateway.client.post("/admin/models/demo/tune", json={"minutes": 60})
    assert reply.status_code == 202, reply.text

    def wait_for_figures() -> Any:
        report = gateway.client.get("/admin/models/demo/tune").json()
        assert report["state"] == "running", report
        return sum(trial["speed"] is not None for trial in report["tried"]) >= 2 and report

    report = wait_for("two measured plans", wait_for_figures, 2 * START_S)
    served_trial, other_trial = report["tried"][:2]
    assert served_trial["worth"] == 1
    assert other_trial["argv"] != served_trial["argv"]
    assert other_trial["speed"]["stream"]["value"] > 0
    report_at_end = gateway.client.delete("/admin/models/demo/tune").json()
    assert report_at_end["state"] == "stopped"

    def is_alone() -> bool:
        view = gateway.show("demo")
        live = [
            attempt["id"]
            for attempt in view["attempts"]
            if attempt["state"] in ("starting", "ready")
        ]
        return view["state"] == "ready" and len(live) == 1

    wait_for("the served plan alone", is_alone, START_S)
    assert gateway.show("demo")["wish"]["args"] == before["wish"]["args"]
    # A later test adds it as it was. A change back would start an engine that may serve nobody.
    assert gateway.cli("rm", "demo", "--wait").returncode == 0
