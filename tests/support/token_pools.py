"""Pools of tokens of SGLang."""

from __future__ import annotations

from gateway.engines.common.layers.build import build
from gateway.engines.sglang.engine import SglangRules
from gateway.engines.sglang.kv_cache import TokenPool
from gateway.profiles.profiles import Profiles
from tests.support.published import published_model
from tests.support.versions import NEWEST_SGLANG

PROFILES = Profiles()


def pool(name: str, version: str = NEWEST_SGLANG, tp: int = 1, element_bytes: int = 2) -> TokenPool:
    rules = PROFILES.rules([PROFILES.engine(f"sglang=={version}")])[f"sglang=={version}"]
    assert isinstance(rules, SglangRules)
    assert rules.memory is not None
    return TokenPool(rules.memory, build(published_model(name)).attention, tp, element_bytes)
