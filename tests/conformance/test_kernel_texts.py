"""Versions without rules take each linear kernel's rules from the version whose code it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.profiles.profiles import Profiles
from tests.conformance.kernel_texts import kernel_texts, kernels_as, read_texts

PROFILES = Profiles()
GUESSED = [
    ref
    for ref in PROFILES.diff_files
    if ref.startswith("vllm==") and ref.partition("==")[2] in read_texts()
]
CODE = """
class Kernel:
    def can_implement(self):
        return {answer}

    def apply(self):
        return {product}
"""


def digest(folder: Path, answer: int, product: int) -> str:
    path = folder / "vllm/model_executor/kernels/linear/kernel.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CODE.format(answer=answer, product=product) + f"# {product}\n")
    return kernel_texts(folder)["Kernel"]


def test_a_digest_follows_the_choice_of_a_kernel_and_not_its_product(tmp_path: Path) -> None:
    first_digest = digest(tmp_path, 1, 1)
    assert digest(tmp_path, 1, 2) == first_digest
    assert digest(tmp_path, 2, 1) != first_digest


@pytest.mark.parametrize("ref", GUESSED)
def test_a_profile_names_the_kernels_that_the_kept_digests_show(ref: str) -> None:
    engine = PROFILES.engine(ref)
    assert engine.kernels_as == kernels_as(ref, str(engine.guessed_from), PROFILES)


def test_a_kernel_follows_the_version_of_its_code() -> None:
    """RTX 6000 Ada and 0.29.0: github.com/vllm-project/vllm issue 58241."""
    refs = ("vllm==0.29.0", "vllm==0.26.0", "vllm==0.33.0")
    rules = PROFILES.rules(PROFILES.engine(ref) for ref in refs)
    mixed, older, newer = (rules[ref].linear for ref in refs)
    assert mixed is not None
    assert older is not None
    assert newer is not None
    marlin, cutlass = "MarlinFP8ScaledMMLinearKernel", "CutlassFP8ScaledMMLinearKernel"
    assert mixed.kernels[marlin] == newer.kernels[marlin] != older.kernels[marlin]
    assert mixed.kernels[cutlass] == older.kernels[cutlass] != newer.kernels[cutlass]
