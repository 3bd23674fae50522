"""The start method of vLLM's processes."""

from __future__ import annotations

import pytest

from gateway.domain import Scalar
from gateway.engines.vllm.start_method import VARIABLE, start_method
from tests.support.makers import engine

VLLM = engine(user_env=(VARIABLE,))


def test_vllm_gets_the_variable_that_lets_it_fork() -> None:
    choice = start_method(VLLM, {}, "LlamaForCausalLM")[VARIABLE]
    assert choice.value == "fork"
    assert "import" in choice.reason


@pytest.mark.parametrize(
    "args",
    [
        {"numa-bind": True},
        {"numa-bind-nodes": "0,1"},
        {"mm-tensor-ipc": "torch_shm"},
        {"distributed-executor-backend": "ray"},
    ],
)
def test_the_choice_of_an_engine_that_spawns_is_left_to_it(args: dict[str, Scalar]) -> None:
    assert start_method(VLLM, args, "LlamaForCausalLM") == {}


def test_whisper_a_cpu_and_a_version_without_the_variable_are_left_to_the_engine() -> None:
    assert start_method(VLLM, {}, "WhisperForConditionalGeneration") == {}
    assert start_method(engine("cpu", user_env=(VARIABLE,)), {}, "LlamaForCausalLM") == {}
    assert start_method(engine(), {}, "LlamaForCausalLM") == {}
    assert start_method(VLLM, {"mm-tensor-ipc": "cuda"}, "LlamaForCausalLM")
