"""Answers of vLLM's own code, beside stand-ins of its modules."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from gateway.engines.vllm.inside import answers


class AttentionSpec:
    pass


class Layer:
    def get_attn_backend(self) -> str:
        return "TRITON_ATTN"


@pytest.mark.parametrize("is_customized", [True, False])
def test_a_spec_has_the_bytes_of_its_backend(
    monkeypatch: pytest.MonkeyPatch, is_customized: bool
) -> None:
    """Versions before 0.33.0 have no such step."""
    interface: Any = types.ModuleType("vllm.v1.kv_cache_interface")
    interface.AttentionSpec = AttentionSpec
    utils: Any = types.ModuleType("vllm.v1.worker.utils")
    if is_customized:
        utils.customize_attention_spec = lambda backend, spec: (backend, spec)
    for module in (interface, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec, state = AttentionSpec(), object()
    customize = answers._customize_spec
    assert customize(Layer(), spec) == (("TRITON_ATTN", spec) if is_customized else spec)
    assert customize(Layer(), state) is state
