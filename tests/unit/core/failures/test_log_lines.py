"""A line of a log is as long as what can be read of it at once."""

from __future__ import annotations

import re

import pytest

from gateway.core.failures.log_lines import clean


@pytest.mark.parametrize("word", ["7", "a.", "a_", "/", "a-b/c.d_"])
def test_a_word_without_end_is_cut_and_what_stands_behind_it_is_read(word: str) -> None:
    """Whoever writes into an engine's log could hold up the gateway: each of a hundred patterns began anew at each character of such a word."""
    long = word * (3900 // len(word))
    text = clean(f"ERROR {long} torch.OutOfMemoryError: CUDA out of memory {long}".encode())
    assert max(map(len, re.findall(r"[\w./-]+", text))) == 256
    assert " torch.OutOfMemoryError: CUDA out of memory " in text
    path = "/usr/lib/python3.12/site-packages/" + "vllm/" * 30
    assert path in clean(f'File "{path}x.py", line 3'.encode())
