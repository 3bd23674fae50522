"""Models of the previous gateway, as the next one shows them before its first pass."""

from __future__ import annotations

from pathlib import Path

from gateway.controller.fleet.model_state import status
from gateway.controller.fleet.restored_models import load_models
from gateway.store.store import Store
from tests.support.makers import plan, wish


def test_a_stopped_model_is_never_shown_as_starting(tmp_path: Path) -> None:
    store = Store(tmp_path / "fitserve.db")
    for name in ("idle", "running", "wanted"):
        store.add_model(wish(name=name), 1.0)
    store.add_attempt("running", 0, plan(), 8000, 1.0)
    for name in ("idle", "running"):
        store.set_stopped(name, is_stopped=True)
    models = load_models(store)
    assert {name: status(model)[0] for name, model in models.items()} == {
        "idle": "stopped",
        "running": "stopping",
        "wanted": "starting",
    }
    store.close()
