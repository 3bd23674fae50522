"""The memory of vLLM versions is counted as their own code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.engines.vllm.encoder_profile import PROFILED_ENCODERS
from gateway.engines.vllm.engine import GRAPHS_IN_BUDGET, LARGE_BATCHES, SMALL_GB10_BATCHES
from gateway.engines.vllm.memory import COUNTED_SECOND_GRAPHS, SECOND_RUNNERS
from gateway.profiles.profiles import Profiles
from tests.conformance.memory_traits import MEMORY_TRAITS, memory_traits, read_traits
from tests.support.versions import VLLM

VERSIONS = [
    ref.removeprefix("vllm==") for ref in Profiles().engine_files if ref.startswith("vllm==")
]
DENSE = """
class VllmConfig:
    def _is_default_v2_model_runner_model(self):
        return not model_config.is_moe

    def use_v2_model_runner(self):
        return self._is_default_v2_model_runner_model()
"""


def test_every_version_has_read_traits() -> None:
    assert {*read_traits()} >= {*VERSIONS, *VLLM}


@pytest.mark.parametrize("version", list(read_traits()))
def test_a_version_has_the_traits_of_its_own_memory(version: str) -> None:
    traits = {*Profiles().engine(f"vllm=={version}").traits}
    assert traits & MEMORY_TRAITS == {*read_traits()[version]}


def test_the_traits_are_those_of_the_memory() -> None:
    traits = {GRAPHS_IN_BUDGET, LARGE_BATCHES, SMALL_GB10_BATCHES, PROFILED_ENCODERS}
    assert traits | SECOND_RUNNERS | {COUNTED_SECOND_GRAPHS} == MEMORY_TRAITS


def test_traits_are_read_from_code(tmp_path: Path) -> None:
    assert memory_traits(tmp_path) == []
    path = tmp_path / "vllm/config/vllm.py"
    path.parent.mkdir(parents=True)
    path.write_text(DENSE)
    assert memory_traits(tmp_path) == ["dense_second_runner"]
    path.write_text(DENSE.replace("return self._is_default_v2_model_runner_model()", "return True"))
    assert "second_runner" in memory_traits(tmp_path)
