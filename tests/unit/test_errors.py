"""The words of errors about faults outside, and about names that were mistyped."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from gateway.errors import no_model_error, short_reason
from tests.support.patience import hang_s


def test_a_refused_connection_is_reported_without_numbers() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="Connect call failed") as of_asyncio:
            asyncio.run(asyncio.open_connection("127.0.0.1", port))
        with pytest.raises(httpx.ConnectError) as of_httpx:
            httpx.get(f"http://127.0.0.1:{port}", trust_env=False, timeout=hang_s())
    assert short_reason(of_asyncio.value) == short_reason(of_httpx.value) == "Connection refused"


def test_each_reason_of_a_name_with_several_addresses_is_reported_once() -> None:
    message = (
        "Multiple exceptions: [Errno 111] Connect call failed ('::1', 9, 0, 0), [Errno 111] Connect"
        " call failed ('127.0.0.1', 9)"
    )
    assert short_reason(OSError(message)) == "Connection refused"


def test_an_error_without_words_is_told_by_its_name() -> None:
    assert short_reason(httpx.ReadError("")) == "ReadError"


def test_a_name_that_was_mistyped_is_told_the_nearest() -> None:
    names = {"qwen": "qwen", "gpt-4o": "qwen", "llama": "llama"}
    assert "Did you mean qwen?" in no_model_error("qwn", names).hint
    assert "Did you mean qwen?" in no_model_error("gpt-4", names).hint
    assert "Did you mean" not in no_model_error("zzz", names).hint
