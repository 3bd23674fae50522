"""The distribution that has a module."""

from __future__ import annotations

import pytest

from gateway.diagnosis.clues.distributions import Distributions, removing_version
from gateway.diagnosis.signature import ImportName
from tests.support.cure_reports import steps_of

ROWS = (ImportName(module="frob", distribution="frob-headless", source="x"),)
DISTRIBUTIONS = Distributions(ROWS, {"frob-headless", "frab-core"})


@pytest.mark.parametrize(
    ("module", "name", "other_name"),
    [
        ("frob", "frob-headless", "frob-headless"),
        ("frob.part", "frob-headless", "frob-headless"),
        ("frab_core", "frab_core", ""),
        ("frib", "", ""),
        ("", "", ""),
    ],
    ids=["another name", "a part", "the same name", "unknown", "none"],
)
def test_a_module_has_a_distribution_if_an_engine_names_it(
    module: str, name: str, other_name: str
) -> None:
    assert DISTRIBUTIONS.name(module) == name
    assert DISTRIBUTIONS.other_name(module) == other_name


def missing(module: str) -> tuple[str, ...]:
    return steps_of(
        {
            "engine": "vllm==0.33.0",
            "frames": ["vllm/entrypoints/cli/main.py:main"],
            "raises": f"ModuleNotFoundError: No module named '{module}'",
        }
    )


def test_a_missing_module_is_installed_by_its_distribution() -> None:
    assert missing("dotenv")[0].startswith("Install python-dotenv, which has the module dotenv")
    assert missing("distro")[0].startswith("Install distro in the engine's environment")


def test_a_module_that_no_engine_names_is_never_installed_by_its_name() -> None:
    steps = missing("frobpkg")
    assert steps[0].startswith("Look up the distribution that has the module frobpkg")
    assert not any(step.startswith("Install frobpkg") for step in steps)


def import_failure(raised: str) -> tuple[str, ...]:
    frames = ["vllm/multimodal/video.py:<module>", "cv2/__init__.py:<module>"]
    return steps_of({"engine": "vllm==0.33.0", "frames": frames, "raises": raised})


def test_a_package_that_failed_at_its_import_is_named_by_its_distribution() -> None:
    steps = import_failure(
        "ImportError: cannot import name 'frob' from 'cv2.core' (unknown location)"
    )
    assert any("opencv-python-headless" in step for step in steps[:2])
    assert not any(step.startswith("Install cv2") for step in steps)


def test_no_package_is_reinstalled_for_a_library_of_the_system() -> None:
    steps = import_failure("ImportError: libxcb.so.1: cannot open shared object file: No such file")
    assert not any(step.startswith(("Install opencv", "Install cv2")) for step in steps[:2])


def test_a_module_that_left_python_asks_for_an_older_one() -> None:
    assert removing_version("audioop") == "3.13"
    assert removing_version("frob") == ""
    assert missing("audioop")[0].startswith("Use a Python before 3.13")
