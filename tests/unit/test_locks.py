"""The locked requirements: an environment for tests has all that the product needs, so
`scripts/setup` leaves it as it is."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT


def pins(lock: str) -> set[str]:
    return set(
        re.findall(r"^[\w.\[\]-]+==\S+", (ROOT / "requirements" / lock).read_text(), re.MULTILINE)
    )


@pytest.mark.parametrize(
    "lock", ["cluster.txt", "oidc.txt", "otel.txt", "process.txt", "runtime.txt"]
)
def test_the_packages_of_the_tests_have_the_very_versions_of_the_product(lock: str) -> None:
    assert len(pins(lock)) > 20
    assert pins(lock) <= pins("dev.txt")
