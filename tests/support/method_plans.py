"""Decisions for quantization methods."""

from __future__ import annotations

from gateway.domain import Decision
from gateway.profiles.profiles import Profiles
from tests.support.makers import machine, spec, wish
from tests.support.planning import decide
from tests.support.versions import VLLM

PROFILES = Profiles()


ENGINES = {version: PROFILES.engine(f"vllm=={version}") for version in VLLM}


def make_decision(
    version: str, hardware: str, block: dict[str, object] | None, **wishes: object
) -> Decision:
    engines = [ENGINES[version]]
    config = {"quantization_config": block} if block else {}
    return decide(
        spec(**config), machine(hardware), engines, wish(**wishes), rules=PROFILES.rules(engines)
    )
