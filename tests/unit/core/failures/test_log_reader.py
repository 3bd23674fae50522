import pytest

from gateway.core.failures.log_reader import LogReader
from gateway.profiles import Profiles
from tests.support.paths import LOGS

SIGNATURES = Profiles().signatures


@pytest.mark.parametrize(
    ("log", "before", "made", "warm"),
    [
        ("healthy-vllm-0.18.0-serving", "GPU KV cache size", "Capturing CUDA graphs", "init engine"),
        ("healthy-llama-3.1-8b-tp2", "GPU KV cache size", "Capturing CUDA graphs", "init engine"),
        ("healthy-qwen3.5-9b", "GPU KV cache size", "Capturing CUDA graphs", "init engine"),
        ("healthy-a2-tiny-llama-eager-again", "GPU KV cache size", "init engine", "init engine"),
        ("healthy-sglang-0.5.10.post1-serving", "KV Cache is allocated", "Memory pool end", "Prefill batch"),
        ("healthy-sglang-0.5.23-serving", "KV Cache is allocated", "Memory pool end", "Prefill batch"),
    ],
)
def test_the_log_says_when_the_kv_cache_stands(log: str, before: str, made: str, warm: str) -> None:
    reader = LogReader(SIGNATURES)
    seen: list[tuple[bool, bool, str]] = []
    for line in (LOGS / f"{log}.log").read_bytes().splitlines():
        reader.read(line)
        seen.append((reader.stands, reader.warm, line.decode(errors="replace")))
    assert not any(stands for stands, _, line in seen if before in line)
    assert made in next(line for stands, _, line in seen if stands)
    assert warm in next(line for _, settled, line in seen if settled)
