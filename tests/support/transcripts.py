"""Copies of requests for transcripts, and a file of keys that encrypt them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from cryptography.fernet import Fernet

from gateway.proxy.transcripts.exchange_copy import ExchangeCopy

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def exchange_copy(**fields: Any) -> ExchangeCopy:
    """The copy of a chat without a stream, with other values for these fields."""
    usual_copy = ExchangeCopy(
        id="req_1",
        key="app",
        model="m",
        replica="m-0",
        endpoint="chat",
        path="/v1/chat/completions",
        started_at=1_700_000_000.5,
        queued_s=0.1,
        routed_s=0.1,
        first_byte_s=0.3,
        duration_s=0.5,
        status=200,
        outcome="answered",
        error="",
        is_stream=False,
        prompt_tokens=3,
        completion_tokens=2,
        cached_tokens=None,
        request=CHAT,
        request_bytes=len(CHAT),
        answer=b'{"choices":[{"index":0,"message":{"content":"Hello"}}]}',
        has_head=False,
        is_chunked=False,
        answer_bytes=55,
        is_cut=False,
    )
    return msgspec.structs.replace(usual_copy, **fields)


def write_keys(path: Path, *keys: str) -> Path:
    """A file that only its owner reads. keys: None for a new one."""
    path.write_text("".join(f"{key}\n" for key in keys or (new_key(),)))
    path.chmod(0o600)
    return path


def new_key() -> str:
    return Fernet.generate_key().decode()
