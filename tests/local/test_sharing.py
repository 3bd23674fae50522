"""Models that share a GPU without a flag: engines that take and measure memory as vLLM does, on a pretended RTX 3090."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.boot_storm import BootStorm
from tests.e2e.conftest import wait_for


def shown(storm: BootStorm, name: str) -> dict[str, Any]:
    view: dict[str, Any] = storm.gateway.show(name)
    return view


def ready(storm: BootStorm, *names: str) -> None:
    wait_for(f"{names} are ready", lambda: all(shown(storm, name)["state"] == "ready" for name in names))


def promised(view: dict[str, Any]) -> int:
    memory = view["plan"]["memory"]
    return int(memory["budget_bytes"] + memory["beside_bytes"])


def test_small_models_added_one_after_the_other_all_serve_and_the_first_gives_what_it_does_not_need(tmp_path: Path) -> None:
    storm = BootStorm(tmp_path, models=5, gpus=1, snapshot="3090")
    total = storm.machine.gpus[0].total_bytes or 0
    try:
        storm.gateway.start()
        storm.add("m0")
        ready(storm, "m0")
        alone = shown(storm, "m0")
        assert promised(alone) > 0.85 * total, "who is alone takes what is free"
        for name in storm.names[1:]:
            storm.add(name)
            ready(storm, *[other for other in storm.names if other <= name])
        views = {name: shown(storm, name) for name in storm.names}
        assert sum(map(promised, views.values())) <= total
        assert views["m0"]["plan"]["cap"]["models"][0] == "m1"
        assert all(view["plan"]["max_model_len"]["value"] >= 32768 for view in views.values())
        failures = [one["failure"] for view in views.values() for one in view["attempts"] if one["failure"]]
        assert not failures, json.dumps(failures)
    finally:
        storm.close()
