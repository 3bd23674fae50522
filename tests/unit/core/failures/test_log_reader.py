import pytest

from gateway.core.failures.diagnose import diagnose
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


OOM = """\
(EngineCore_DP0 pid=74) ERROR 09-28 15:47:24 [core.py:718] Traceback (most recent call last):
(EngineCore_DP0 pid=74) ERROR 09-28 15:47:24 [core.py:718]   File "vllm/v1/worker/gpu_worker.py", line 180, in init_device
(EngineCore_DP0 pid=74) ERROR 09-28 15:47:24 [core.py:718] ValueError: Free memory on device (3.22/4.0 GiB) on startup is less than \
desired GPU memory utilization (0.9, 3.6 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
"""


@pytest.mark.parametrize(
    "pasted",
    [
        OOM.replace("\n", " "),
        OOM.replace("\n", "\\n"),
        OOM.replace("\n", "\r"),
        OOM.replace("\n", "\r\n"),
        OOM.replace(" ERROR", "\u00a0ERROR").replace("] ", "]\u00a0"),
        "".join(f"│ {line:<400} │\n" for line in OOM.splitlines()),
        "".join(f"w-7[error] {line}\\n\n" for line in OOM.splitlines()),
        "".join(f"\x1b[1;36m{line[:24]}\x1b[0;0m{line[24:]}\x1b[0m\n" for line in OOM.splitlines()),
        "\0\ufffd" * 500 + "\n" + OOM,
    ],
    ids=["one-line", "ends-written-out", "mac", "windows", "page-spaces", "frame", "console", "colours", "binary"],
)
def test_a_paste_is_read_however_it_was_carried(pasted: str) -> None:
    failure = diagnose([pasted.encode()], SIGNATURES)[0]
    assert (failure.kind, failure.culprit["wanted_bytes"]) == ("gpu_shared", int(3.6 * 2**30))


def test_a_request_that_holds_a_traceback_stays_one_line() -> None:
    prompt = "INFO 09-28 15:47:24 [logger.py:1] Received request r: prompt: 'why? " + OOM.replace("\n", "\\n") + "'\n"
    assert diagnose([("INFO 09-28 15:47:20 [x.py:1] Starting\n" + prompt).encode()], SIGNATURES)[0].kind == "none"


def test_a_message_that_a_terminal_broke_is_named_by_the_whole_of_it() -> None:
    found = diagnose(
        [
            b"pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            b"  Value error, User-specified max_model_len (100000) is greater than the deriv\n"
            b"ed max_model_len (max_position_embeddings=2048 or model_max_length=None in model\n"
        ],
        SIGNATURES,
    )[0]
    assert (found.kind, found.culprit["engine_max_model_len"]) == ("context_beyond_model", 2048)
