"""Logs of any length: lines of a serving engine, and a fatal error at the end."""

from __future__ import annotations

from collections.abc import Iterator

_PIECE = 1024 * 1024
START = b"(APIServer pid=1) INFO:     Application startup complete.\n"
LINES = (
    b'(APIServer pid=1) INFO:     172.17.0.1:51000 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n',
    (
        b"(APIServer pid=1) INFO 06-18 03:14:07 [loggers.py:257] Engine 000: Avg prompt throughput:"
        b" 120.4 tokens/s, Avg generation throughput: 60.1 tokens/s, Running: 3 reqs, Waiting: 0"
        b" reqs, GPU KV cache usage: 1.2%, Prefix cache hit rate: 3.1%\n"
    ),
    (
        b"(APIServer pid=1) INFO 06-18 03:14:07 [logger.py:43] Received request chatcmpl-1: prompt:"
        b" 'Why does it rain?', params: SamplingParams(n=1), lora_request: None.\n"
    ),
)
SURVIVED = (
    b"(APIServer pid=1) ERROR 06-18 03:14:07 [serving_chat.py:263] ValueError: This model's maximum"
    b" context length is 8.\n"
)
STARTING = (
    b"(EngineCore pid=271) DEBUG 06-18 03:14:07 [utils.py:1257] Waiting for 1 local, 0 remote core"
    b" engine proc(s) to start.\n"
)
FATAL = (
    b"(EngineCore pid=271) ERROR 06-18 03:14:07 [core.py:1586] EngineCore encountered a fatal"
    b" error.\n(EngineCore pid=271) ERROR 06-18 03:14:07 [core.py:1586] Traceback (most recent call"
    b" last):\n(EngineCore pid=271) ERROR 06-18 03:14:07 [core.py:1586] torch.OutOfMemoryError:"
    b" CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.56 GiB of"
    b" which 1.10 GiB is free.\n"
)


def long_log(kind: str, megabytes: int) -> Iterator[bytes]:
    """The log in pieces of a MiB: quiet; noisy with an error that it survives in every tenth line;
    starting, which never serves."""
    if kind == "starting":
        block = STARTING * 10
    else:
        yield START
        block = b"".join(LINES) * 3 + (SURVIVED if kind == "noisy" else LINES[0])
    piece = block * (_PIECE // len(block) + 1)
    for _ in range(megabytes * 1_000_000 // len(piece) + 1):
        yield piece
    yield FATAL
