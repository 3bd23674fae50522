"""Why a flag is closed, in words that are true of it."""

import re

import pytest

from gateway.engines.common.open_flags import REVIEWED_FLAGS, closing_reason
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("name", "reason_part", "advice"),
    [
        ("port", "the gateway sets it", ""),
        ("revision", "names a file, a folder or an address", "--revision"),
        ("trust-remote-code", "loads code", "--allow-remote-code"),
        ("dp-size", "that the plan does not count", "--replicas"),
        ("speculative-config", "names a file", "--drafter"),
        ("ssl-keyfile", "clients reach the gateway", ""),
        ("a-flag-of-tomorrow", "nobody has looked yet", ""),
    ],
)
def test_a_refusal_says_its_own_reason(name: str, reason_part: str, advice: str) -> None:
    reason, do = closing_reason(name)
    assert reason_part in reason
    assert advice in do
    assert bool(advice) == bool(do)


def test_every_reviewed_flag_is_one_of_a_described_engine() -> None:
    texts = [
        path.read_text()
        for folder in ("engines", "engine_diffs")
        for path in (ROOT / "profiles" / folder).rglob("*.yaml")
    ]
    names = set(re.findall(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*", "\n".join(texts)))
    assert {*REVIEWED_FLAGS.split()} - names == set()
