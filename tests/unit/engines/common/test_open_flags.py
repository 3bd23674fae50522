"""Why a flag is closed, in words that are true of it."""

import pytest

from gateway.engines.common.open_flags import why_closed


@pytest.mark.parametrize(
    ("name", "why", "instead"),
    [
        ("port", "the gateway sets it", "Leave it out."),
        ("revision", "names a file, a folder or an address", "--revision"),
        ("trust-remote-code", "loads code", "--allow-remote-code"),
        ("dp-size", "that the plan does not count", "--replicas"),
        ("speculative-config", "names a file", "--drafter"),
        ("ssl-keyfile", "clients reach the gateway", "Leave it out."),
        ("a-flag-of-tomorrow", "nobody has looked yet", "Leave it out."),
    ],
)
def test_a_refusal_says_its_own_reason(name: str, why: str, instead: str) -> None:
    said, do = why_closed(name)
    assert why in said
    assert instead in do
