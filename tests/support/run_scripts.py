"""Scripts of engines for commands that add and run models."""

from __future__ import annotations

from gateway.domain import LaunchSpec
from tests.support.scripted_engine import EngineScript


def script(spec: LaunchSpec, **does: object) -> EngineScript:
    return EngineScript(model=spec.model, **does)  # type: ignore[arg-type]
