"""The head of a webhook."""

from __future__ import annotations

from gateway.controller.events.webhook import headers
from gateway.secret import Secret


def test_a_message_is_signed_as_the_specification_signs_its_example() -> None:
    """Source: test_sign_function of standard-webhooks/libraries/python/tests/test_webhooks.py."""
    key = Secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    lines = headers("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}', key)
    assert (
        lines == b"webhook-id: msg_p5jXN8AQM9LWM0D4loKWxJek\r\n"
        b"webhook-timestamp: 1614265330\r\n"
        b"webhook-signature: v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=\r\n"
    )


def test_nothing_is_signed_without_a_secret() -> None:
    assert headers("evt_1", 5, b"{}", None) == b"webhook-id: evt_1\r\nwebhook-timestamp: 5\r\n"
