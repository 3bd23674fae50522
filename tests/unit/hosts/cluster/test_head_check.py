"""Sentences for machines that cannot join, and the token's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import SettingsError
from gateway.hosts.cluster import head_check
from gateway.hosts.cluster.head_check import HeadAway, check_ray, judge
from gateway.hosts.cluster.membership import Membership, check_token, make_token

MEMBERSHIP = Membership(
    name="two", role="node", head="10.0.0.1:6379", address="10.0.0.2", token_file=Path("/t")
)
OWN = {"ray": "2.60.0", "python": "3.11.7"}


@pytest.mark.parametrize(
    ("answer", "kind", "words", "cure"),
    [
        ({"state": "away", "why": "timed out"}, HeadAway, "timed out", "firewall"),
        ({"state": "token"}, SettingsError, "The token in /t is not", "scp -p"),
        (
            {"state": "ok", "ray": "2.59.0", "python": "3.11.7"},
            SettingsError,
            "The head runs Ray 2.59.0, and this machine 2.60.0",
            "with Ray 2.59.0 here, or 2.60.0 there",
        ),
        (
            {"state": "ok", "ray": "2.60.0", "python": "3.11.2"},
            SettingsError,
            "The head runs Python 3.11.2, and this machine 3.11.7",
            "with Python 3.11.2 here",
        ),
    ],
)
def test_each_cause_has_its_sentence(
    answer: dict[str, str], kind: type[SettingsError], words: str, cure: str
) -> None:
    with pytest.raises(kind) as error:
        judge(MEMBERSHIP, answer, OWN)
    assert words in error.value.message
    assert cure in error.value.hint


def test_a_head_of_the_same_versions_is_joined() -> None:
    judge(MEMBERSHIP, {"state": "ok", **OWN}, OWN)


def test_another_version_of_ray_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_check, "version", lambda _: "2.59.0")
    with pytest.raises(SettingsError, match=r"needs Ray 2\.60\.0; installed is 2\.59\.0") as wrong:
        check_ray()
    assert "'.[cluster]'" in wrong.value.hint


def test_a_made_token_is_kept_and_good(tmp_path: Path) -> None:
    path = tmp_path / "cluster" / "token"
    make_token(path)
    first_text = path.read_text()
    make_token(path)
    assert path.read_text() == first_text
    assert path.stat().st_mode & 0o777 == 0o600
    check_token(path)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("x" * 31, 0o600, "has 31 bytes; 32 are the least"),
        ("x" * 32 + "\n", 0o640, "Other users can use the token file"),
        (None, 0, "cannot be read"),
    ],
)
def test_a_weak_or_open_token_is_refused(
    tmp_path: Path, text: str | None, mode: int, words: str
) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(SettingsError, match=words) as error:
        check_token(path)
    assert error.value.hint
