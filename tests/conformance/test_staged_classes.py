"""Classes without stages, of SGLang versions without rules."""

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
    for version, told in (("0.5.11", True), ("0.5.12.post1", True), ("0.5.13", False)):
        without = Profiles().engine(f"sglang=={version}").no_stages
        assert ("Gemma4ForConditionalGeneration" in without) is told
