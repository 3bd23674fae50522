"""The locked requirements: an environment for tests has all that the product needs, so
`scripts/setup` leaves it as it is. Every package is locked by hash."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

LOCKS = sorted(path.name for path in (ROOT / "requirements").glob("*.txt"))
_PINNED = re.compile(r"(?P<name>[A-Za-z0-9][\w.\[\],-]*)==[^\s;]+")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
# A requirements file as an argument of pip.
_FILE_ARGUMENT = re.compile(r"(?:\s-r|--requirement)[\s=]")


def pins(lock: str) -> set[str]:
    return set(
        re.findall(r"^[\w.\[\]-]+==\S+", (ROOT / "requirements" / lock).read_text(), re.MULTILINE)
    )


@pytest.mark.parametrize(
    "lock",
    ["cluster.txt", "knowledge.txt", "oidc.txt", "otel.txt", "process.txt", "runtime.txt"],
)
def test_the_packages_of_the_tests_have_the_very_versions_of_the_product(lock: str) -> None:
    assert len(pins(lock)) > 20
    assert pins(lock) <= pins("dev.txt")


def programs() -> list[str]:
    """The files that install packages."""
    folders = ("scripts", "docker", ".github/workflows")
    paths = [path for folder in folders for path in (ROOT / folder).iterdir() if path.is_file()]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_one_version_and_hashes(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.split("#")[0].strip()]
    assert lines
    unlocked = [
        line[:80]
        for line in lines
        if not _PINNED.match(line) or not _HASH.search(line) or "://" in line.split(" #")[0]
    ]
    assert unlocked == []


def test_no_program_installs_a_lock_without_its_hashes() -> None:
    installing = [
        (name, line)
        for name in programs()
        for line in (ROOT / name).read_text().replace("\\\n", " ").splitlines()
        if _FILE_ARGUMENT.search(line) and "pip" in line
    ]
    assert len(installing) >= 4
    assert [entry for entry in installing if "--require-hashes" not in entry[1]] == []
