"""Classes without stages, of versions without rules."""

from __future__ import annotations

from pathlib import Path

from gateway.domain.profile_diff import ProfileDiff
from gateway.profiles.profiles import Profiles
from tests.conformance.staged_classes import with_stages

SOURCE = """
class Base:
    def forward(self, ids): ...

class Whole(Base): ...

class Staged(Base):
    def forward(self, ids, pp_proxy_tensors=None): ...

class Empty: ...
"""


def test_a_class_without_the_argument_has_no_stages(tmp_path: Path) -> None:
    models = tmp_path / "sglang/srt/models"
    models.mkdir(parents=True)
    (models / "made.py").write_text(SOURCE)
    near = Profiles().engine("sglang==0.5.23")
    diff = ProfileDiff(
        kind="sglang", version="0.5.22", guessed_from=near.ref, source="made",
        architectures=("Whole", "Staged", "Empty"),
    )  # fmt: skip
    assert with_stages(diff, near, tmp_path).no_stages == ("Whole",)


def test_gemma_4_has_stages_since_a_version_without_rules() -> None:
    """sgl-project/sglang#25284."""
    for version, has_stages in (("0.5.11", True), ("0.5.12.post1", True), ("0.5.13", False)):
        without = Profiles().engine(f"sglang=={version}").no_stages
        assert ("Gemma4ForConditionalGeneration" in without) is has_stages


OF_VLLM = """
class Staged(Model, SupportsPP):
    def forward(self, ids, intermediate_tensors=None): ...

class Drafting(Staged):
    def forward(self, ids, hidden_states): ...

class Later(Staged): ...

class Whole(Model):
    def forward(self, ids, intermediate_tensors=None): ...
"""
REGISTRY = "".join(
    f'    "{name}ForCausalLM": ("made", "{name}"),\n' for name in ("Drafting", "Later", "Whole")
)


def test_a_class_of_vllm_needs_the_interface_and_the_argument(tmp_path: Path) -> None:
    models = tmp_path / "vllm/model_executor/models"
    models.mkdir(parents=True)
    (models / "made.py").write_text(OF_VLLM)
    (models / "registry.py").write_text(f"MODELS = {{\n{REGISTRY}}}\n")
    near = Profiles().engine("vllm==0.33.0")
    diff = ProfileDiff(
        kind="vllm", version="0.31.0", guessed_from=near.ref, source="made",
        architectures=("DraftingForCausalLM", "LaterForCausalLM", "WholeForCausalLM"),
    )  # fmt: skip
    without = with_stages(diff, near, tmp_path).no_stages
    assert without == ("DraftingForCausalLM", "WholeForCausalLM")


def test_drafters_of_vllm_without_stages_are_those_of_their_version() -> None:
    """New ones in versions without rules; the drafters of 0.30.0 and 0.31.0 are as in 0.33.0."""
    for version, name in (("0.29.0", "KimiK3MTPModel"), ("0.28.0", "InternS2MobiusMTP")):
        assert name in Profiles().engine(f"vllm=={version}").no_stages
    for version in ("0.30.0", "0.31.0"):
        assert "Qwen3NextMTP" in Profiles().engine(f"vllm=={version}").no_stages
