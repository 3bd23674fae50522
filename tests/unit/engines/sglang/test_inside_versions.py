"""Questions to SGLang versions whose code has other helpers than the newest."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gateway.engines.sglang.inside import attention, layers, model


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("has_stamp", [False, True])
def test_arguments_are_published_with_and_without_a_stamp(
    monkeypatch: pytest.MonkeyPatch, has_stamp: bool
) -> None:
    """0.5.19 and 0.5.20 resolve arguments once, and have no stamp to clear."""
    calls: list[str] = []
    parallel = SimpleNamespace()
    if has_stamp:
        parallel.clear_stamp = lambda: calls.append("cleared")
    module(monkeypatch, "sglang.srt.runtime_context", get_parallel=lambda: parallel)
    module(
        monkeypatch,
        "sglang.srt.server_args",
        set_global_server_args_for_scheduler=lambda _: calls.append("published"),
    )
    model.publish(SimpleNamespace(resolve_once=lambda: calls.append("resolved")))
    assert calls == ["resolved", *(["cleared"] if has_stamp else []), "published"]


def test_layers_with_a_state_are_found_where_the_version_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From 0.5.16 on they are of the model, before of its runner."""
    runner = SimpleNamespace(mambaish_config="of the runner")
    assert attention._hybrid(runner, "model") == "of the runner"
    module(
        monkeypatch,
        "sglang.srt.configs.hybrid_arch",
        mambaish_config=lambda of_model: f"of the {of_model}",
    )
    assert attention._hybrid(SimpleNamespace(), "model") == "of the model"


def test_backends_are_settled_by_functions_with_and_without_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 0.5.19 those of FP8 and FP4 read published arguments, and that of 16 bits takes arguments:
    every inquiry about a model failed."""
    calls: list[Any] = []
    layers_module = "sglang.srt.layers"
    functions = {
        f"{layers_module}.moe.utils": ("moe", calls.append),
        f"{layers_module}.quantization.fp8_utils": ("fp8_gemm", lambda: calls.append("fp8")),
        f"{layers_module}.quantization.fp4_utils": ("fp4_gemm", lambda: calls.append("fp4")),
        f"{layers_module}.quantization.unquant": ("bf16_gemm", calls.append),
    }
    for name, (backend, start) in functions.items():
        module(monkeypatch, name, **{f"initialize_{backend}_config": start})
    model.initialize_backends("arguments")
    assert sorted(calls) == ["arguments", "arguments", "fp4", "fp8"]


def test_a_failed_line_of_the_inquiry_is_no_refusal_of_the_engine() -> None:
    with pytest.raises(ModuleNotFoundError) as error:
        model.initialize_backends(None)  # there is no sglang here
    with pytest.raises(ModuleNotFoundError):
        layers.refusal_text("method", error.value)
    assert layers.refusal_text("method", ValueError("groups of 7")) == "method"
