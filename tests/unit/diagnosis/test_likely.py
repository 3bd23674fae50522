"""Likely kinds by words: texts that no row knows, healthy logs, and no treatment of an engine by
them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.likely import KindClassifier, KindWords, normalize
from gateway.diagnosis.log_reader import LogReader
from gateway.diagnosis.remedy import Case
from gateway.diagnosis.signature import FailureSignature
from gateway.diagnosis.structure import ExceptionShape
from gateway.domain import Failure
from gateway.profiles.profiles import Profiles
from tests.support.paths import LOGS
from tests.support.yaml_file import read_yaml

SIGNATURES = Profiles().signatures
KINDS = [word.kind for word in SIGNATURES.rows.words]
FAILED = [
    case
    for case in read_yaml(LOGS / "index.yaml")
    if case["kind"] != "none" and case.get("line", 0) > 3
]


def read(*lines: str) -> Failure:
    return diagnose(["\n".join(lines).encode()], SIGNATURES)[0]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("RuntimeError: the c10d frobnicator lost the other ranks", "nccl"),
        (
            (
                "RuntimeError: frob: this wheel wants another libfrob, a version mismatch of its"
                " packages"
            ),
            "package",
        ),
        ("RuntimeError: frob: shard 3 of the checkpoint is truncated", "weights_corrupt"),
        ("RuntimeError: frob said the adapter config of this peft model is odd", "lora"),
        ("OSError: frob: disk quota for models", "disk_full"),
        ("Frob: 403 forbidden error, the repository is gated for you", "weights_gated"),
    ],
)
def test_words_of_a_field_name_a_text_that_nobody_knows(line: str, kind: str) -> None:
    failure = read(line)
    assert (failure.kind, failure.proven_subject, failure.line_number) == (kind, "nothing", 1)
    assert failure.message.startswith("Likely: ")
    assert failure.steps


def test_a_likely_kind_names_its_words() -> None:
    failure = read("RuntimeError: the c10d frobnicator lost the other ranks")
    assert failure.culprit == {"words": "c10d, other ranks, ranks"}
    assert failure.message.endswith("these words: c10d, other ranks, ranks.")


def test_frames_speak_where_a_message_says_nothing() -> None:
    kinds = KindClassifier(
        (
            KindWords(kind="lora", frames=("lora", "punica", "apply")),
            KindWords(kind="nccl", sure=("nccl",)),
        )
    )
    frames = ("x/site-packages/vllm/lora/punica_base.py:apply",)
    assert kinds.guess([ExceptionShape("AssertionError", "", frames, "load")]) == (
        "lora",
        ("lora", "punica", "apply"),
    )
    assert (
        kinds.guess(
            [
                ExceptionShape(
                    "AssertionError",
                    "",
                    ("/home/nccl_lora/venv/site-packages/vllm/x.py:run",),
                    "load",
                )
            ]
        )
        is None
    )


def test_the_build_folder_of_a_library_says_nothing() -> None:
    assert (
        read(
            "RuntimeError: frob:build/CMakeFiles/frob.dir/compiler_depend.ts:39 frob error, code 7"
        ).kind
        == "unknown"
    )
    assert read("RuntimeError: frob: cmake, build and compiler frob").kind == "toolchain"


def test_one_word_of_a_field_says_nothing() -> None:
    kinds = KindClassifier((KindWords(kind="lora", words=("adapter",)),))
    assert kinds.guess([ExceptionShape("ValueError", "an adapter", (), "load")]) is None


def test_the_first_kind_of_equal_points_is_meant() -> None:
    kind_words = KindWords(kind="one", sure=("frob",))
    other_kind_words = KindWords(kind="other", sure=("frob",))
    shape = ExceptionShape("", "a frob", (), "load")
    assert [
        KindClassifier(kinds).guess([shape])
        for kinds in ((kind_words, other_kind_words), (other_kind_words, kind_words))
    ] == [
        ("one", ("frob",)),
        ("other", ("frob",)),
    ]


@pytest.mark.parametrize("case", FAILED, ids=lambda case: case["log"])
def test_the_beginning_of_a_log_that_fails_later_is_no_likely_failure(
    case: dict[str, int | str],
) -> None:
    lines = (LOGS / f"{case['log']}.log").read_bytes().split(b"\n")[: int(case["line"]) - 1]
    healthy = next(
        (at for at, line in enumerate(lines) if b"Traceback" in line or b"rror" in line), len(lines)
    )
    assert "words" not in diagnose([b"\n".join(lines[:healthy])], SIGNATURES)[0].culprit


@given(
    st.lists(
        st.sampled_from(
            [
                word
                for each_word in SIGNATURES.rows.words
                for word in ("nccl", "gated", "lora", *each_word.exceptions)
            ]
        ),
        max_size=30,
    )
)
def test_informational_lines_speak_for_nothing(words: list[str]) -> None:
    assert read(f"INFO 11-22 03:04:05 [x.py:9] {' '.join(words)}").kind == "none"


@given(
    st.text(max_size=300), st.sampled_from(["RuntimeError", "ValueError", "KeyError", "FrobError"])
)
def test_a_likely_kind_shows_its_words_in_the_text(text: str, exception: str) -> None:
    guess = KindClassifier(SIGNATURES.rows.words).guess(
        [ExceptionShape(exception, text, (), "load")]
    )
    if guess is not None:
        assert guess[0] in KINDS
        assert all(word in normalize(text) or word == exception for word in guess[1])


def test_no_likely_cause_is_treated() -> None:
    reader = LogReader(SIGNATURES)
    reader.feed(b"RuntimeError: the c10d frobnicator lost the other ranks\n")
    reader.close()
    assert reader.verdict is not None
    assert reader.verdict.kind == "unknown"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_remedy_in_words(kind: str) -> None:
    case = Case(kind, "load", None, {})
    message, _, steps = SIGNATURES.cures.describe(FailureSignature(kind=kind), case)
    assert message != "The engine failed."
    assert steps


def test_an_exception_before_a_reported_death_is_the_likelier_cause() -> None:
    failure = read(
        "CUDA driver error: the frob kernel met an illegal memory access",
        "Worker proc VllmWorker-0 died unexpectedly, shutting down executor.",
    )
    assert (failure.kind, failure.line_number) == ("kernel_runtime", 1)
    assert (
        read("Worker proc VllmWorker-0 died unexpectedly, shutting down executor.").kind == "killed"
    )


def test_words_go_before_a_row_that_is_vague() -> None:
    line = (
        "AssertionError: the model's hidden_size 2880 must be a multiple of 128 for the Marlin tile"
    )
    assert read(line).kind == "no_kernel"
    reader = LogReader(SIGNATURES)
    reader.feed(line.encode())
    reader.close()
    assert reader.verdict is not None
    assert reader.verdict.kind == "config_refused"
    assert "words" not in read("ValueError: frob_mode must be one of 1 and 2").culprit


def test_each_kind_stands_once() -> None:
    assert len(set(KINDS)) == len(KINDS)


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not a regular expression"):
        KindWords(kind="x", sure=("(",))


@pytest.mark.parametrize(
    "text",
    [
        "CUDA driver version is insufficient for CUDA runtime version",
        "<p>ValueError: CUDA driver version is insufficient for CUDA runtime version</p>",
        "my-app | <p>CUDA driver version is insufficient for CUDA runtime version</p>",
    ],
)
def test_a_lone_line_is_a_failure(text: str) -> None:
    assert read(text).kind == "driver_too_old"


def test_a_harmless_line_among_many_is_no_failure() -> None:
    line = "No available memory for the cache blocks"
    assert read(line).kind == "gpu_oom"
    assert read(*["Loading"] * 4, line).kind == "none"


def test_a_kind_that_the_phase_excludes_is_not_meant() -> None:
    words = (
        KindWords(kind="a", sure=("frob",), phases=("load",)),
        KindWords(kind="b", words=("frob",), common_words=("KeyError",), sure=("frob it",)),
    )
    shape = ExceptionShape("KeyError", "frob it", (), "load")
    assert KindClassifier(words).guess([shape]) == ("b", ("frob it", "frob", "KeyError"))
    assert KindClassifier((words[0],)).guess([shape]) == ("a", ("frob",))
    assert KindClassifier((words[0],)).guess([shape._replace(phase="serving")]) is None


@pytest.mark.parametrize(
    ("error", "frame", "serving", "loading"),
    [
        (
            "RuntimeError: size mismatch of the quantized checkpoint",
            "x.py:f",
            "unknown",
            "weights_corrupt",
        ),
        (
            "ValueError: the regex of this grammar must be compatible",
            "constrained/backend.py:f",
            "unknown",
            "config_refused",
        ),
    ],
)
def test_a_file_read_before_the_engine_serves_does_not_fail_later(
    error: str, frame: str, serving: str, loading: str
) -> None:
    file, function = frame.split(":")
    traceback_end = [f'  File "/site-packages/sglang/srt/{file}", line 7, in {function}', error]
    began = (
        "[2026-03-14 10:22:05 TP0] Scheduler hit an exception: Traceback (most recent call last):"
    )
    loop = '  File "/site-packages/sglang/srt/managers/scheduler.py", line 7, in event_loop_overlap'
    load = '  File "/site-packages/sglang/srt/managers/scheduler.py", line 7, in load_model'
    assert read(began, loop, *traceback_end).kind == serving
    assert read(began, load, *traceback_end).kind == loading


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (
            "IndexError: list index out of range",
            'if modalities[image_idx] == "image":',
            "multimodal",
        ),
        ("IndexError: list index out of range", "return self.queue[0]", "engine_bug"),
        (
            "TypeError: '<' not supported between instances of 'NoneType' and 'int'",
            "if self.limit < 0:",
            "engine_bug",
        ),
        ("TypeError: 'NoneType' object is not subscriptable", "self.rows[0] += 1", "engine_bug"),
        (
            "ValueError: not enough values to unpack (expected 2, got 1)",
            "first, second = pair",
            "engine_bug",
        ),
    ],
)
def test_python_words_of_a_fault_are_of_no_field_but_the_code_is(
    error: str, code: str, kind: str
) -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/opt/sglang/srt/managers/scheduler.py", line 7, in step',
        f"    {code}",
        error,
    )
    assert diagnose(["\n".join(lines).encode()], SIGNATURES)[0].kind == kind
