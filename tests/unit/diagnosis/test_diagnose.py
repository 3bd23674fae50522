"""Proofs in logs: the corpus of tests/logs, cut and garbled, and the facts learned from it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from gateway.cli.log_diagnosis import SCHEMA, Diagnosis, report
from gateway.controller.watch.engine_client import EngineClient
from gateway.controller.watch.watcher import WatchContext, Watcher
from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.facts.learn import facts_of_log, learn
from gateway.diagnosis.lines.line_filter import ALARM_WORDS, FATAL_WORDS, PROGRESS_WORDS, LineFilter
from gateway.diagnosis.lines.log_lines import MAX_LINE, clean, parse
from gateway.diagnosis.log_reader import LogReader
from gateway.diagnosis.remedy import Case, fill_template
from gateway.diagnosis.signature import TextSignature
from gateway.diagnosis.signatures import FailureRows, Signatures, parse_groups
from gateway.domain import Attempt, Fact, Failure, LayerKernel, Observation
from gateway.errors import BadRequest, NotFound
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings
from tests.support.long_log import FATAL, long_log
from tests.support.makers import GIB, attempt, engine, machine, make_decision, spec, wish
from tests.support.paths import LOGS
from tests.support.patience import hang_s
from tests.support.planning import decide
from tests.support.program import app
from tests.support.yaml_file import read_yaml

CASES: dict[str, dict[str, Any]] = {case["log"]: case for case in read_yaml(LOGS / "index.yaml")}
FAILED = [name for name, case in CASES.items() if case["kind"] != "none"]
SIGNATURES = Profiles().signatures
UNKNOWN_TEXTS = {"failed-unknown-0.33.0", "failed-unknown-chained-0.26.0", "failed-wrapper-only"}
KINDS = {
    "no_kernel",
    "kernel_runtime",
    "no_backend",
    "forced_choice_invalid",
    "unsupported_quantization",
    "unsupported_architecture",
    "needs_remote_code",
    "gpu_oom",
    "kv_too_small",
    "gpu_shared",
    "host_oom",
    "shm",
    "nccl",
    "driver_too_old",
    "no_kernel_image",
    "gpu_lost",
    "weights_missing",
    "weights_corrupt",
    "weights_gated",
    "port_in_use",
    "disk_full",
    "bad_flag",
    "hang",
    "unknown",
}


def text(name: str) -> bytes:
    return (LOGS / f"{name}.log").read_bytes()


def read(data: bytes, engine: str | None = None) -> Failure:
    return diagnose([data], SIGNATURES, engine)[0]


@pytest.mark.parametrize("name", CASES)
def test_every_log_of_the_corpus_names_its_cause(name: str) -> None:
    case = CASES[name]
    for kind in (case["engine"].partition("==")[0], None):
        failure = read(text(name), kind)
        assert (failure.kind, failure.phase, failure.line_number) == (
            case["kind"],
            case["phase"],
            case.get("line"),
        )
        assert case.get("culprit", {}).items() <= failure.culprit.items()
        if failure.line is not None:
            assert (
                failure.line
                == clean(text(name).split(b"\n")[(failure.line_number or 0) - 1])[:1000]
            )


def test_the_corpus_has_its_counts() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(CASES)
    assert len([name for name in CASES if name.startswith("failed-")]) >= 60
    assert len([name for name in CASES if name.startswith("healthy-")]) >= 20
    assert len([name for name in CASES if name.startswith("trap-")]) >= 15
    assert {case["kind"] for case in CASES.values()} >= KINDS
    assert {case["phase"] for case in CASES.values() if case["kind"] == "gpu_oom"} >= {
        "load",
        "profile",
        "graphs",
        "serving",
    }
    assert sum(path.stat().st_size for path in LOGS.glob("*.log")) < 2_000_000


def test_a_log_says_the_same_in_pieces_of_any_size() -> None:
    for name in (
        "trap-binary",
        "trap-crlf",
        "failed-ranks-interleaved",
        "failed-000-wna16-n32-0.19.1",
    ):
        data = text(name)
        for size in (1, 7, 4096):
            pieces = (data[start : start + size] for start in range(0, len(data), size))
            assert diagnose(pieces, SIGNATURES)[0] == read(data)


def test_unread_lines_change_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = {name: read(text(name)) for name in CASES}
    monkeypatch.setattr("gateway.diagnosis.lines.line_filter._anchor_in", lambda *_: b"frob")
    assert {name: read(text(name)) for name in CASES} == fast


@pytest.mark.parametrize("name", FAILED)
def test_a_start_that_fails_is_known_when_the_proof_was_read(name: str) -> None:
    """Long before the engine gives up: at the line itself where its text is known, else at the line
    that it calls fatal."""
    case = CASES[name]
    reader = LogReader(SIGNATURES, case["engine"].partition("==")[0])
    for number, line in enumerate(text(name).split(b"\n"), 1):
        reader.read(line)
        if number == case["line"]:
            break
    if name in (*UNKNOWN_TEXTS, "failed-ranks-nccl-speaks-first"):
        return
    assert reader.failure is not None
    assert (reader.failure.kind, reader.failure.phase) == (case["kind"], case["phase"])


def test_the_reasons_after_the_proof_make_it_better() -> None:
    reader = LogReader(SIGNATURES, "vllm")
    lines = text("failed-000-wna16-n32-0.19.1").split(b"\n")
    at = next(number for number, line in enumerate(lines) if b"Failed to find a kernel" in line)
    for line in lines[: at + 1]:
        reader.read(line)
    first_failure = reader.failure
    for line in lines[at + 1 : at + 8]:
        reader.read(line)
    assert first_failure is not None
    assert reader.failure is not None
    assert "n" not in first_failure.culprit
    assert reader.failure.culprit["n"] == 32


def test_phases_are_recognised() -> None:
    reader = LogReader(SIGNATURES, "vllm")
    phases = []
    for line in text("healthy-vllm-0.26.0-serving").split(b"\n"):
        reader.read(line)
        phases += [reader.progress.phase] if reader.progress.phase not in phases else []
    assert phases == ["starting", "load", "profile", "compile", "kv", "graphs", "serving"]
    assert reader.progress.reported_values == {
        "version": "0.26.0",
        "model": "/models/m",
        "tensor_parallel": "1",
    }


def test_only_fatal_lines_of_an_engine_that_serves_are_believed() -> None:
    reader = LogReader(SIGNATURES, "vllm")
    reader.mark_serving()
    proof = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    for line in (
        b"Traceback (most recent call last):",
        proof,
        b"(APIServer pid=1) ERROR 06-18 03:14:07 [x.py:1] " + proof,
    ):
        reader.read(line)
    failure_in_service = reader.failure
    for line in FATAL.split(b"\n"):
        reader.read(line)
    assert failure_in_service is None
    assert reader.failure is not None
    assert reader.failure.kind == "gpu_oom"


@given(st.binary(max_size=4000))
def test_no_bytes_make_it_raise(data: bytes) -> None:
    failure = read(data)
    report(
        Diagnosis(
            failure,
            facts_of_log(failure, {"engine": "vllm==0.26.0", "model": "m"}),
            has_answered=False,
        )
    )


@st.composite
def garble(draw: st.DrawFn) -> bytes:
    """A log of the corpus with lines lost, doubled, cut and bytes changed."""
    lines = text(draw(st.sampled_from(sorted(CASES)))).split(b"\n")[-150:]
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(lines) - 1))
        lines[at : at + 1] = draw(
            st.sampled_from(
                [
                    [],
                    [lines[at]] * 2,
                    [lines[at][: len(lines[at]) // 2]],
                    [lines[at] + b"\xff\x00\x1b[31m"],
                ]
            )
        )
        lines = lines or [b""]
    return b"\n".join(lines)


@given(garble())
def test_no_garbled_log_makes_it_raise(data: bytes) -> None:
    failure = read(data)
    assert (failure.kind == "none") == (failure.line is None)


@pytest.mark.parametrize("kind", ["quiet", "noisy", "starting"])
def test_a_log_ten_times_as_long_costs_not_much_more_than_ten_times_as_much(kind: str) -> None:
    """In CPU time, the best of several: work that grows with the square would cost a hundred times.
    benchmarks/diagnosis.py tells how fast 200 MB are read."""

    def cost(megabytes: int) -> float:
        cpu_times = []
        for _ in range(3):
            began = time.process_time()
            failure, reader = diagnose(long_log(kind, megabytes), SIGNATURES)
            cpu_times.append(time.process_time() - began)
            assert failure.kind == "gpu_oom"
            assert len(reader._lines._unfinished_line) == 0
        return min(cpu_times)

    assert cost(10) < 40 * cost(1)


def test_a_line_without_end_is_dropped_and_not_kept() -> None:
    reader = LogReader(SIGNATURES)
    for _ in range(50):
        reader.feed(b"x" * 65_536)
    assert len(reader._lines._unfinished_line) <= 128 * 1024
    reader.feed(b"\nValueError: Unknown attention backend: 'NOPE'\n")
    assert reader._lines.number == 2
    assert reader.failure is not None


def test_lines_are_numbered_and_handed_over_once() -> None:
    rows: list[tuple[int, bytes]] = []
    lines = LineFilter(lambda raw: rows.append((lines.number, raw)))
    for piece in (
        b"the first lines are read whole\n" * 60,
        b"nothing\nan Er",
        b"ror\n\nTrace",
        b"back",
    ):
        lines.feed(piece)
    lines.close()
    assert [(number, raw) for number, raw in rows[60:] if raw] == [
        (62, b"an Error"),
        (64, b"Traceback"),
    ]
    assert len(rows) == 62


@given(st.lists(st.text("aErorXc0123456789 OM", max_size=12), max_size=40))
def test_a_line_is_found_however_often_its_like_stands_beside_it(texts: list[str]) -> None:
    handed: list[bytes] = []
    lines = LineFilter(handed.append)
    lines.attend = 0
    raw = [text.encode() for text in texts]
    lines.feed(b"".join(line + b"\n" for line in raw))
    assert handed == [line for line in raw if any(anchor in line for anchor in lines.anchors)]


def test_no_anchor_has_a_digit() -> None:
    assert not [
        anchor
        for anchor in ALARM_WORDS + FATAL_WORDS + PROGRESS_WORDS
        if any(48 <= byte < 58 for byte in anchor)
    ]


@pytest.mark.parametrize(
    ("line", "process", "level", "text"),
    [
        (
            b"\x1b[0;36m(EngineCore pid=7)\x1b[0;0m ERROR 11-21 02:22:44 [core.py:1330] boom",
            "(EngineCore pid=7)",
            "ERROR",
            "boom",
        ),
        (
            b"(APIServer pid=1) (EngineCore_DP0 pid=68) boom",
            "(APIServer pid=1) (EngineCore_DP0 pid=68)",
            None,
            "boom",
        ),
        (b"[2026-06-18 03:14:07 DP0 TP1] boom", "DP0 TP1", None, "boom"),
        (
            b"[rank0]:[W1121 02:22:46.357759533 ProcessGroupNCCL.cpp:1575] Warning: x",
            "[rank0]:",
            "WARNING",
            "Warning: x",
        ),
        (b"2026-06-18T03:14:07.123456789Z vllm-1  | INFO:     Started", "", "INFO", "Started"),
        (b"50%|###  |\r100%|#####|\rboom\r", "", None, "boom"),
        (b"\xff plain", "", None, "\ufffd plain"),
    ],
)
def test_process_and_level_are_separated_from_the_text(
    line: bytes, process: str, level: str | None, text: str
) -> None:
    log_line = parse(clean(line))
    assert (log_line.process, log_line.level, log_line.text) == (process, level, text)
    assert len(clean(b"(" * 100_000)) == MAX_LINE


def test_a_signature_of_another_engine_does_not_match() -> None:
    rows = Signatures(
        FailureRows(texts=(TextSignature(kind="x", pattern="boom", engines=("sglang",)),))
    )
    assert diagnose([b"ValueError: boom\n"], rows, "vllm")[0].kind == "unknown"
    assert diagnose([b"ValueError: boom\n"], rows, "sglang")[0].kind == "x"
    assert diagnose([b"ValueError: boom\n"], rows)[0].kind == "x"


def test_a_signature_that_is_no_expression_is_refused() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        TextSignature(kind="x", pattern="(boom")


def test_groups_are_numbers_and_sizes() -> None:
    groups = parse_groups(
        {"a": "7", "b2": "x", "free_gib": "1.5", "tried_bytes": "2.00 MiB", "none": None}
    )
    assert groups == {"a": 7, "b": "x", "free_bytes": 3 * 2**29, "tried_bytes": 2**21}
    assert fill_template("{free_bytes} of {b}[[ and {gone}]]", groups) == "1.50 GiB of x"
    assert fill_template("{free_bytes} of {gone}", groups) is None


def test_every_signature_has_a_source_and_a_remedy() -> None:
    rows = SIGNATURES.rows
    for several in (rows.texts, rows.progress, rows.endings):
        assert all(row.source for row in several)
    for row in (*rows.texts, *rows.structures):
        # Words and steps of its own, or those of its kind.
        case = Case(row.kind, row.phase or "load", None, {})
        message, advice, steps = SIGNATURES.cures.describe(row, case)
        assert message != "The engine failed.", row
        assert advice, row
        assert steps, row


# --- while it is printed ---


class Printing:
    """A host whose engine prints lines and then nothing more."""

    kind = "process"
    machines = None

    def __init__(self, lines: list[bytes], *, ends: bool) -> None:
        self.lines, self.ends = lines, ends

    async def follow(self, _name: str) -> AsyncIterator[bytes]:
        for line in self.lines:
            yield line
        if not self.ends:
            await asyncio.Event().wait()


async def watch_log(name: str, *, ends: bool) -> Observation:
    """A watcher's reading of a log, once it has a proof or the log has ended."""
    wake_event = asyncio.Event()
    lines = text(name).split(b"\n")
    settings = Settings.model_validate({"data_dir": "/nonexistent"})
    host = Printing(lines if ends else lines[: CASES[name]["line"]], ends=ends)
    context = WatchContext(
        host,  # type: ignore[arg-type]
        SIGNATURES,
        settings,
        EngineClient(1),
        wake_event.set,
    )
    watcher = Watcher(failed_attempt(), "x", "http://127.0.0.1:1", context)
    try:
        async with asyncio.timeout(hang_s()):
            while watcher.observation.proof is None and not watcher.observation.has_log_ended:
                await wake_event.wait()
                wake_event.clear()
        return watcher.observation
    finally:
        await watcher.close()


@pytest.mark.anyio
async def test_the_watcher_waits_for_no_end_of_an_engine_whose_log_has_the_proof() -> None:
    """The engine goes on hanging there, and says no more."""
    for name in (
        "failed-e-kv-too-small-for-len-ns",
        "failed-001-marlin-moe-first-request",
        "failed-sglang-oom-graphs-0.5.23",
    ):
        seen_watch_log = await watch_log(name, ends=False)
        proof = seen_watch_log.proof
        assert proof is not None
        assert (proof.kind, proof.line_number) == (CASES[name]["kind"], CASES[name]["line"])
        assert not seen_watch_log.has_log_ended


@pytest.mark.anyio
async def test_the_watcher_returns_unknown_texts_at_the_end_of_the_log() -> None:
    proof = (await watch_log("failed-unknown-0.33.0", ends=True)).proof
    assert proof is not None
    assert (proof.kind, proof.line_number) == (
        "unsupported_architecture",
        CASES["failed-unknown-0.33.0"]["line"],
    )
    assert proof.proven_subject == "plan"
    assert (await watch_log("healthy-c-awq", ends=True)).proof is None


# --- learned facts ---


@cache
def proven(name: str) -> Failure:
    return read(text(name), CASES[name]["engine"].partition("==")[0])


@cache
def failed_attempt() -> Attempt:
    return attempt(7)


def learn_facts(name: str, **changes: Any) -> tuple[Fact, ...]:
    start = failed_attempt()
    return learn(start.evolve(plan=start.plan.evolve(**changes)), proven(name), 5.0)


def test_the_engines_maximum_becomes_a_fact_about_this_plan_only() -> None:
    (fact,) = learn_facts("failed-cpu-kv-too-small")
    assert (fact.kind, fact.value, fact.attempt, fact.at) == ("max_context", 384, 7, 5.0)
    assert fact.scope == failed_attempt().plan.scope
    assert "384" in fact.source


def test_a_maximum_that_the_plan_kept_rules_out_the_plan() -> None:
    (fact,) = learn_facts(
        "failed-e-len-beyond-model",
        max_model_len=failed_attempt().plan.max_model_len.evolve(value=8192),
    )
    assert fact.kind == "plan_failed"


def test_a_kernel_that_crashed_is_avoided_wherever_it_has_the_same_size() -> None:
    rows = (
        LayerKernel(
            layer="experts.w13",
            count=1,
            k=2880,
            n=5760,
            scheme="mxfp4",
            kernel="MARLIN",
            status="ok",
        ),
        LayerKernel(
            layer="experts.w2",
            count=1,
            k=2880,
            n=2880,
            scheme="mxfp4",
            kernel="MARLIN",
            status="ok",
        ),
    )
    (fact,) = learn_facts("failed-c-moe2880-ct-mxfp4", kernels=rows)
    assert fact.kind == "kernel_fails"
    scope = {
        "engine": "vllm==9.9.0",
        "capability": "8.6",
        "kernel": "MARLIN",
        "scheme": "mxfp4",
        "k": "2880",
        "n": "2880",
    }
    assert fact.scope == scope


def test_a_kernel_without_a_size_is_avoided_altogether() -> None:
    rows = (
        LayerKernel(
            layer="qkv",
            count=1,
            k=64,
            n=64,
            scheme="fp8",
            kernel="CutlassFP8ScaledMMLinearKernel",
            status="ok",
        ),
    )
    (fact,) = learn_facts("failed-004-error-internal-vision", kernels=rows)
    assert fact.scope == {
        "engine": "vllm==9.9.0",
        "capability": "8.6",
        "kernel": "CutlassFP8ScaledMMLinearKernel",
    }


def test_a_kernel_of_another_size_leaves_the_plans_kernel() -> None:
    rows = (
        LayerKernel(
            layer="in_proj_ba",
            count=1,
            k=2048,
            n=32,
            scheme="wna16",
            kernel="TritonW4A16LinearKernel",
            status="ok",
        ),
        LayerKernel(
            layer="qkv",
            count=1,
            k=2048,
            n=4096,
            scheme="wna16",
            kernel="MarlinLinearKernel",
            status="ok",
        ),
    )
    (fact,) = learn_facts("failed-000-wna16-n32-0.19.1", kernels=rows)
    assert (fact.scope["kernel"], fact.scope["n"]) == ("TritonW4A16LinearKernel", "32")


def test_a_kernel_unknown_to_the_plan_rules_out_the_plan_itself() -> None:
    (fact,) = learn_facts("failed-004-error-internal-vision")
    assert (fact.kind, fact.scope) == ("plan_failed", {"fingerprint": failed_attempt().fingerprint})


def test_an_engine_that_lacks_the_architecture_is_ruled_out_for_it() -> None:
    fact, failed_start = learn_facts("failed-e-arch-unknown")
    assert (fact.kind, fact.scope["architecture"], failed_start.kind) == (
        "engine_fails",
        "FooBarForCausalLM",
        "plan_failed",
    )


def test_memory_that_ran_out_rules_out_the_plan_and_says_how_much_it_was() -> None:
    bytes_fact, failed_fact = learn_facts("failed-oom-profile-0.33.0")
    assert (bytes_fact.kind, bytes_fact.value, failed_fact.kind) == (
        "needs_memory",
        int(24.45 * GIB),
        "plan_failed",
    )
    assert bytes_fact.scope["max_num_batched_tokens"] == "2048"
    spare, _ = learn_facts("failed-oom-graphs-0.26.0")
    assert (spare.kind, spare.value) == ("spare_memory", 64 * 2**20)
    assert "budget" not in spare.scope
    missing, _ = learn_facts("failed-oom-serving")
    assert missing.value == 2 * GIB - int(1.1 * GIB)


@pytest.mark.parametrize(
    "name",
    ["failed-port-0.19.1", "failed-gpu-shared-0.26.0", "failed-disk-full-0.33.0", "failed-xid79"],
)
def test_a_failure_that_no_plan_helps_teaches_nothing(name: str) -> None:
    assert learn_facts(name) == ()


@pytest.mark.parametrize("name", FAILED)
def test_no_failure_leaves_its_plan_allowed(name: str) -> None:
    """Each either lies outside the plan, or leaves a fact about the plan or a part of it."""
    failure = proven(name)
    assert bool(learn(failed_attempt(), failure, 0.0)) is not (failure.proven_subject == "nothing")


@pytest.mark.parametrize(
    "name", sorted({(case["kind"], case["phase"]): name for name, case in CASES.items()}.values())
)
def test_the_same_plan_is_never_made_again_for_the_same_cause(name: str) -> None:
    facts = learn_facts(name)
    next_fingerprints = {plan.fingerprint for plan in make_decision(facts=facts).plans}
    assert (failed_attempt().fingerprint in next_fingerprints) is not bool(facts)


def facts_of(*facts: Fact) -> list[str]:
    decision = decide(spec(), machine("2x3090"), [engine()], wish(), facts)
    return [rejection.verdict for rejection in decision.rejected] if not decision.plans else []


def test_an_engine_that_is_known_to_fail_is_not_planned() -> None:
    def fact(**scope: str) -> Fact:
        return Fact(
            kind="engine_fails",
            scope={"engine": "vllm==9.9.0", **scope},
            grade="failed",
            source="seen",
        )

    assert facts_of(fact(architecture="LlamaForCausalLM")) == ["known_bad"]
    assert facts_of(fact(capability="8.6")) == ["known_bad"]
    assert facts_of(fact(architecture="OtherForCausalLM")) == []
    assert facts_of(fact(capability="9.0")) == []
    assert facts_of(fact()) == []


def test_a_log_alone_proves_no_more_than_it_says() -> None:
    failure = proven("failed-c-moe2880-ct-mxfp4")
    (fact,) = facts_of_log(failure, {"engine": "vllm==0.26.0", "model": "m"})
    assert fact.scope == {
        "engine": "vllm==0.26.0",
        "capability": "unknown",
        "kernel": "MARLIN",
        "k": "2880",
        "n": "2880",
    }
    assert facts_of_log(failure, {}) == ()
    (fact,) = facts_of_log(
        proven("failed-e-kv-too-small-for-len-ns"),
        {"engine": "vllm==0.26.0", "model": "m", "tensor_parallel": "1"},
    )
    assert (fact.kind, fact.value, fact.scope["model"]) == ("max_context", 51312, "m")
    assert (
        facts_of_log(proven("failed-e-kv-too-small-for-len-ns"), {"engine": "vllm==0.26.0"}) == ()
    )


# --- the command ---


def run(*arguments: str, input_: bytes = b"") -> Iterator[Any]:
    result = CliRunner().invoke(app, ["diagnose", *arguments], input=input_)
    yield from (result.exit_code, result.output, result.exception)


def test_the_command_cites_the_line_and_fails() -> None:
    code, output, _ = run(
        str(LOGS / "failed-e-kv-too-small-for-len-ns.log"), "--engine", "vllm==0.26.0"
    )
    assert code == 1
    assert output.startswith(
        "kv_too_small (while making the KV cache): A context of 131072 tokens needs 16.00 GiB"
        " of KV cache, and 6.26 GiB are available.\nline 51: "
    )
    assert "fact: max_context 51312" in output


def test_the_command_speaks_json_and_reads_standard_input() -> None:
    code, output, _ = run("-", "--json", input_=text("failed-e-kv-too-small-for-len-ns"))
    assert code == 1
    document = yaml.safe_load(output)
    keys = [
        "schema",
        "kind",
        "healthy",
        "message",
        "phase",
        "culprit",
        "engine_max_model_len",
        "line",
        "line_number",
    ]
    keys += ["facts", "advice", "steps", "proves"]
    assert list(document) == keys
    assert (
        document["schema"],
        document["kind"],
        document["engine_max_model_len"],
        document["line_number"],
    ) == (SCHEMA, "kv_too_small", 51312, 51)
    assert {"kernel", "backend", "layer", "flag", "value"} <= set(document["culprit"])
    assert document["facts"][0]["scope"]["engine"] == "vllm==0.26.0"
    assert document["message"].startswith("A context of 131072 tokens needs")
    assert document["steps"][0] == (
        "Request a context of at most 51312 tokens (--max-model-len), which fits."
    )
    assert document["advice"]


@pytest.mark.parametrize(
    "name",
    ["healthy-vllm-0.19.1-loading", "healthy-warnings-survived", "healthy-sglang-0.5.23-graphs"],
)
def test_a_log_without_a_failure_is_not_proof_of_health(name: str) -> None:
    """Only an answer is: a server that started may be deaf, and of a start that is not over nobody
    knows how it ends."""
    code, output, _ = run(str(LOGS / f"{name}.log"))
    assert (code, output.split(":")[0]) == (4, "unknown")


def test_a_healthy_log_is_no_failure() -> None:
    code, output, _ = run(str(LOGS / "healthy-c-awq.log"), "--json")
    assert code == 0
    document = yaml.safe_load(output)
    assert (document["kind"], document["line"], document["facts"], document["advice"]) == (
        "none",
        None,
        [],
        [],
    )


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [(("/nowhere.log",), BadRequest), (("-", "--engine", "tgi==1.0"), NotFound)],
)
def test_an_unreadable_log_is_reported(arguments: tuple[str, ...], kind: type[Exception]) -> None:
    _, _, error = run(*arguments)
    assert isinstance(error, kind)
