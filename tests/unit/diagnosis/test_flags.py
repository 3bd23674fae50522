"""Knowledge about a flag that an engine refused."""

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.flags import refused_flag
from gateway.profiles.profiles import Profiles

FLAGS = {
    "0.1.0": frozenset({"frob-size", "old-frob"}),
    "0.9.0": frozenset({"frob-size"}),
    "0.10.0": frozenset({"frob-size", "new-frob"}),
}


@pytest.mark.parametrize(
    ("argument", "facts"),
    [
        ("-frob-size 7", {"dashed": "--frob-size"}),
        ("--new-frob", {"flag_in": "0.10.0"}),
        ("--old_frob=7", {"flag_in": "0.1.0"}),
        ("--frob-sizes", {"flag_nowhere": "yes", "flag_near": "--frob-size"}),
        ("--temperature 0.8", {"flag_nowhere": "yes", "sampling": "temperature"}),
        ("--job", {"flag_nowhere": "yes"}),
    ],
)
def test_a_refused_flag_is_held_against_the_versions(argument: str, facts: object) -> None:
    assert refused_flag(f"x: error: unrecognized arguments: {argument}", "0.9.0", FLAGS) == facts


def test_nothing_is_known_without_flags_or_refusal() -> None:
    assert refused_flag("x: error: unrecognized arguments: --job", "0.9.0", {}) == {}
    assert refused_flag("x: error: argument --job: invalid", "0.9.0", FLAGS) == {}


def test_the_described_versions_name_the_flag() -> None:
    line = b"vllm: error: unrecognized arguments: --tensor-paralel-size 2\n"
    failure, _ = diagnose([line], Profiles().signatures, "vllm==0.19.1")
    assert failure.kind == "bad_flag"
    assert "--tensor-parallel-size" in failure.steps[0]
