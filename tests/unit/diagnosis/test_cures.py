"""Cures by the case: steps for its circumstances stand first, in flags of its engine."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.remedy import Case
from gateway.diagnosis.signature import CureStep
from gateway.diagnosis.structure import ExceptionShape
from gateway.domain import Failure
from gateway.errors import SettingsError
from gateway.profiles.profiles import Profiles
from tests.support.cure_reports import REPORTS, measure
from tests.support.engine_logs import log_of_row
from tests.support.paths import LOGS, ROOT
from tests.support.yaml_file import read_yaml

PROFILES = Profiles()
SIGNATURES = PROFILES.signatures
CURES = SIGNATURES.cures
ENGINES = ("vllm", "sglang")
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
# Flags of docker, nvidia-smi, git and fitserve itself, in steps about the machine.
FOREIGN = {
    "allow-remote-code",
    "cap-add",
    "device",
    "engine",
    "gpu-reset",
    "gpus",
    "help",
    "ipc",
    "query-gpu",
    "shm-size",
    "trust-remote-code",
    "ulimit",
    "update",
    "format",
}


def read(*lines: str, engine: str | None = None) -> Failure:
    return diagnose(["\n".join(lines).encode()], SIGNATURES, engine)[0]


def steps() -> list[tuple[str, CureStep]]:
    return [
        *((f"remedy of {row.kind}", step) for row in CURES.rows.remedies for step in row.steps),
        *((f"lever {row.circumstances}", step) for row in CURES.rows.levers for step in row.steps),
        *(
            (f"{row.kind}: {row.message[:40]}", step)
            for row in (*SIGNATURES.rows.texts, *SIGNATURES.rows.structures)
            for step in row.steps
        ),
    ]


@cache
def flags(kind: str) -> frozenset[str]:
    refs = [ref for ref in PROFILES.engine_files if ref.startswith(f"{kind}==")]
    flag_names = {name for ref in refs for name in PROFILES.engine(ref).flags}
    return frozenset(flag_names | {f"no-{name}" for name in flag_names})


@pytest.mark.parametrize(
    ("place", "step"),
    [(where, step) for where, step in steps() if step.engines],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_step_of_one_engine_names_that_engines_flags(place: str, step: CureStep) -> None:
    for engine in set(step.engines) & set(ENGINES):
        assert set(_FLAG.findall(step.text)) - FOREIGN <= flags(engine), place


def test_each_condition_of_a_cure_is_known_somewhere() -> None:
    texts = [row.pattern for row in SIGNATURES.rows.texts]
    texts += [row.pattern for row in SIGNATURES.rows.structures]
    texts += [row.pattern for row in SIGNATURES.rows.progress]
    texts += [
        pattern
        for row in CURES.rows.circumstances
        for pattern in (row.pattern, row.frames, row.message)
    ]
    known_texts = {name for text in texts for name in re.findall(r"\(\?P<(\w+?)\d*>", text)}
    known_texts |= {name for row in CURES.rows.circumstances for name in (row.name, *row.implied)}
    known_texts |= {
        "newer",
        "older",
        "newest",
        "engine_version",
        "model_elsewhere",
        "model_in",
        "named",
        "own_part",
        "advised",
        "demand",
        "reasons",
        "settings",
        "fault",
    }
    known_texts |= {"others_bytes", "layer", "kernel", "engine_code", "one_rank", "program_fault"}
    known_texts |= {"code_change", "code_gone", "no_other_code"}
    known_texts |= {"beyond_home", "enough_free", "folder_variable", "local_copy", "one_channel"}
    known_texts |= {"raising_package", "switch", "switch_named", "refused_value", "exceeded_flag"}
    known_texts |= {"own_variable", "zero_option", "own_memory", "unsplit", "dumped", "callee"}
    known_texts |= {"feature", "distribution", "known_module", "asked_package", "backend_flag"}
    known_texts |= {"chosen", "doing", "unset_option", "unset_by", "removed_in"}
    known_texts |= {"assertion", "position_rows", "other_interface"}
    known_texts |= {f"during_{row.step}" for row in SIGNATURES.rows.progress if row.step}
    known_texts |= {"features", "related", "change", "backend", "dashed", "flag_in", "flag_nowhere"}
    conditions = {
        name
        for _, step in steps()
        for name in (*step.circumstances, *step.values, *step.exceptions)
    }
    conditions |= {
        name
        for row in CURES.rows.levers
        for name in (*row.circumstances, *row.values, *row.exceptions)
    }
    unknown = sorted(conditions - known_texts)
    assert not unknown, (
        f"{unknown} come from nowhere: name each as a group of a pattern, or as a row of"
        " profiles/failures/circumstances.yaml."
    )


def test_each_kind_has_words_and_an_item_in_the_documents() -> None:
    rows = (*SIGNATURES.rows.texts, *SIGNATURES.rows.structures)
    kinds = {row.kind for row in rows} | {row.kind for row in CURES.rows.remedies}
    kinds_with_words = {row.kind for row in SIGNATURES.rows.words}
    # Kinds that the gateway finds itself have no log of their own.
    kinds_of_gateway = {
        "stalled",
        "host_error",
        "verification_failed",
        "gibberish",
        "engine_refuses",
    }
    kinds_of_gateway |= {"withdrawn", "ram_shared"}
    wordless = kinds - kinds_with_words - kinds_of_gateway
    assert not wordless, (
        f"{sorted(wordless)} have no words: add a row for each to"
        " profiles/failures/words.yaml, with words of its field."
    )
    items = (ROOT / "docs/reliability.md").read_text().partition("## Kinds of failure")[2]
    items = items.partition("\n## ")[0]
    undocumented = sorted(kind for kind in kinds if f"`{kind}`" not in items)
    assert not undocumented, (
        f'{undocumented} have no item: add one to "Kinds of failure" in docs/reliability.md.'
    )


def test_a_row_of_a_kind_without_a_cure_is_refused(tmp_path: Path) -> None:
    texts = tmp_path / "failures" / "texts"
    texts.mkdir(parents=True)
    (texts / "mine.yaml").write_text("- {kind: my_kind, pattern: boom, source: me}\n")
    with pytest.raises(SettingsError, match="my_kind") as error:
        _ = Profiles(tmp_path).signatures
    assert "remedies.yaml" in str(error.value.hint)


@pytest.mark.parametrize("name", ["failures.yaml", "failure_words.yaml"])
def test_a_file_of_the_old_form_is_refused_and_names_the_new_folder(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("[]\n")
    with pytest.raises(SettingsError, match=name) as error:
        Profiles(tmp_path)
    assert "failures/" in str(error.value.hint)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", sorted(CURES.remedies))
def test_every_kind_has_steps_in_every_phase_of_either_engine(kind: str, engine: str) -> None:
    for phase in ("starting", "load", "profile", "kv", "graphs", "serving", "waking"):
        case = Case(kind, phase, engine, {})
        assert CURES.describe(CURES.remedies[kind], case)[2], phase


CASES = read_yaml(LOGS / "cures.yaml")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["shows"])
def test_the_step_for_the_case_stands_first(case: dict[str, str]) -> None:
    failure = read(case["log"], engine=case["engine"])
    assert failure.kind in case["kinds"]
    assert len(failure.steps) >= len(case["steps"])
    for step, words in zip(failure.steps, case["steps"], strict=False):
        assert re.search(words, step), failure.steps
    for words in case.get("never", []):
        assert not [step for step in failure.steps if words in step]


def test_the_versions_beside_the_failing_one_are_named() -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/x/site-packages/vllm/v1/worker/gpu_worker.py", line 7, in frob',
        "AttributeError: 'Frob' object has no attribute 'frobs'",
    )
    middle, last = (read(*lines, engine=f"vllm=={version}") for version in ("0.26.0", "99.0"))
    assert (middle.kind, last.kind) == ("engine_bug", "engine_bug")
    newest = CURES.known_versions("vllm", "0.26.0")["newer"]
    assert str(newest) in middle.steps[0]
    assert str(CURES.known_versions("vllm", "99.0")["older"]) in last.steps[0]


def test_a_version_without_the_model_is_not_named() -> None:
    model = "Gemma4ForConditionalGeneration"
    assert "older" in CURES.known_versions("vllm", "0.19.1")
    assert "older" not in CURES.known_versions("vllm", "0.19.1", model)
    assert CURES.known_versions("vllm", "0.19.1", model)["newer"]


@pytest.mark.parametrize(
    ("engine", "architecture", "step"),
    [
        ("vllm==0.18.0", "DeepseekV4ForCausalLM", "vllm==0.33.0: it has the architecture."),
        ("vllm==0.18.0", "NoFrobForCausalLM", "came out after the model"),
        ("sglang==0.5.23", "BloomForCausalLM", "vllm==0.33.0: it has the architecture."),
        # The version has the architecture, so the failure is another one.
        ("vllm==0.33.0", "DeepseekV4ForCausalLM", "came out after the model"),
    ],
)
def test_the_version_that_has_an_architecture_is_named(
    engine: str, architecture: str, step: str
) -> None:
    line = f"ValueError: Model architectures ['{architecture}'] are not supported for now."
    failure = read(line, engine=engine)
    assert failure.kind == "unsupported_architecture"
    assert step in failure.steps[0]


def test_names_of_the_program_are_no_settings() -> None:
    code = (
        "Traceback (most recent call last):",
        '  File "/x/site-packages/vllm/v1/core/kv_cache_coordinator.py", line 7, in __init__',
    )
    bare = read(*code, "    assert not enable_caching", "AssertionError", engine="vllm==0.28.0")
    failure = read(*code, "ValueError: enable_caching and block_size", engine="vllm==0.28.0")
    assert not any("enable_caching" in step for step in bare.steps)
    assert any("--block-size, enable_caching" in step for step in failure.steps)


def test_the_other_versions_complete_every_step_that_speaks_of_one() -> None:
    line = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert "as vllm==0.33.0 or vllm==0.25.1" in " ".join(read(line, engine="vllm==0.26.0").steps)
    assert "another engine version: " in " ".join(read(line).steps)


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        (
            "vllm serve: error: argument --frob: invalid choice: 'x' (choose from 'a', 'b')",
            "'a', 'b'",
        ),
        ("AssertionError: fa3, triton is required for Frob but got frob", "fa3, triton"),
    ],
)
def test_the_values_that_a_message_lists_are_named(line: str, choices: str) -> None:
    frames = (
        "Traceback (most recent call last):",
        '  File "/x/sglang/srt/server_args.py", line 7, in f',
    )
    failure = read(*frames, line, engine="sglang")
    assert any(step.endswith(f"omit the setting: {choices}.") for step in failure.steps[:2])


def test_indices_of_a_kernel_are_no_reasons() -> None:
    line = "/p/IndexKernel.cu:94: f: block: [5,0,0], thread: [17,0,0] Assertion `i < n` failed."
    assert "reasons" not in read(line, engine="vllm").message


def test_a_lever_ends_with_the_version_that_mends_the_fault() -> None:
    lines = (
        "NVIDIA GB10",
        "Starting to load model /models/frob...",
        "torch.OutOfMemoryError: CUDA out of memory.",
    )
    steps = [read(*lines, engine=f"vllm=={version}").steps for version in ("0.23.0", "0.24.0")]
    assert [any("0.24.0" in step for step in several) for several in steps] == [True, False]


REQUEST = (
    "ERROR:    Exception in ASGI application",
    "Traceback (most recent call last):",
    '  File "/x/site-packages/starlette/middleware/errors.py", line 7, in __call__',
    "    raise exc",
    '  File "/x/site-packages/sglang/srt/function_call/frob_detector.py", line 7, in parse',
    "    name = match.group(1)",
)
ALIVE = 'INFO:     10.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK'


@pytest.mark.parametrize(
    "error",
    [
        'RuntimeError: Assertion error (/src/jit/kernel_runtime.hpp:107): "Corrupted JIT cache"',
        "OSError: /root/.cache/flashinfer/0.6.14/90a/cached_ops/norm/norm.so: file too short",
        "ImportError: /root/.cache/torch_extensions/py312/frob/frob.so: invalid ELF header",
    ],
)
def test_a_damaged_cache_of_kernels_is_emptied_first(error: str) -> None:
    frame = '  File "/opt/venv/lib/python3.12/site-packages/vllm/utils/deep_gemm.py", line 4, in f'
    failure = read("Traceback (most recent call last):", frame, error, engine="vllm")
    assert failure.steps[0].startswith("Empty the cache of compiled kernels")


@pytest.mark.parametrize(
    ("error", "times", "kind"),
    [
        ("AttributeError: 'NoneType' object has no attribute 'group'", 3, "engine_bug"),
        ("AttributeError: 'NoneType' object has no attribute 'group'", 1, "none"),
        ("ValueError: The prompt is longer than the context.", 3, "none"),
    ],
)
def test_a_fault_of_several_requests_is_named_while_the_engine_serves(
    error: str, times: int, kind: str
) -> None:
    ready = "The server is fired up and ready to roll!"
    failure = read(ready, ALIVE, *((*REQUEST, error, ALIVE) * times), engine="sglang")
    assert failure.kind == kind
    if kind != "none":
        assert failure.proven_subject == "nothing"
        assert "3 requests failed so" in failure.message


CALLED = (
    "Traceback (most recent call last):",
    '  File "/x/site-packages/sglang/srt/entrypoints/openai/serving_chat.py", line 7, in stream',
    '  File "/x/site-packages/sglang/srt/frob.py", line 7, in read',
)


@pytest.mark.parametrize(
    ("raised_in", "error", "is_fault"),
    [
        # Python's own faults, wherever below the engine.
        ("/x/site-packages/frob_parser/core.py", "AssertionError", True),
        ("/x/site-packages/sglang/srt/frob.py", "ImportError: Please install frob", True),
        # A library of media refuses a client's data.
        ("/x/site-packages/torchcodec/frob.py", "RuntimeError: no video stream", False),
        # The carrier of requests fails with its client.
        ("/x/site-packages/starlette/responses.py", "AssertionError", False),
    ],
)
def test_the_code_that_raises_the_error_of_a_request_decides_whose_fault_it_is(
    raised_in: str, error: str, is_fault: bool
) -> None:
    request = (*CALLED, f'  File "{raised_in}", line 7, in frob', error, ALIVE)
    ready = "The server is fired up and ready to roll!"
    failure = read(ready, ALIVE, *(request * 2), engine="sglang")
    assert (failure.kind != "none") is is_fault


def test_an_uncaught_error_is_the_servers_own() -> None:
    request = (*CALLED, "ValueError: frob", ALIVE)
    web = '  File "/x/site-packages/uvicorn/protocols/http/h11_impl.py", line 7, in run_asgi'
    ready = "The server is fired up and ready to roll!"
    assert read(ready, ALIVE, *(request * 2), engine="sglang").kind == "none"
    uncaught = (request[0], web, *request[1:])
    assert read(ready, ALIVE, *(uncaught * 2), engine="sglang").kind != "none"


@pytest.mark.parametrize(
    ("process", "kind"), [("Worker_TP0 pid=7", "config_refused"), ("APIServer pid=1", "none")]
)
def test_a_workers_report_of_requests_needs_no_traceback(process: str, kind: str) -> None:
    report = f"({process}) ERROR 03-14 10:22:05 [frob.py:7] RuntimeError: Remote frob id mismatch."
    ready = "INFO:     Application startup complete."
    assert read(ready, report, ALIVE, report, ALIVE, engine="vllm").kind == kind


def test_an_error_of_the_request_transport_is_no_fault_of_the_engine() -> None:
    error_lines = (*REQUEST[:4], "RuntimeError: Unexpected ASGI message.", ALIVE)
    ready = "The server is fired up and ready to roll!"
    assert read(ready, ALIVE, *(error_lines * 5), engine="sglang").kind == "none"


@pytest.mark.parametrize(
    ("kind", "cure"),
    [("weights_missing", "user"), ("tokenizer", "engine"), ("gpu_oom", "plan")],
)
def test_the_place_of_a_cure_goes_with_the_failure(kind: str, cure: str) -> None:
    assert CURES.cure(Case(kind, "load", "vllm", {})) == cure
    case_with_drafter = Case("engine_bug", "load", "vllm", {"drafter": "yes"})
    assert CURES.cure(case_with_drafter) == "plan"
    assert CURES.cure(case_with_drafter._replace(values={})) == "engine"


@pytest.mark.parametrize(
    ("code", "callee"),
    [
        ("with frobload.safe_open(path, device) as file:", "frobload"),
        ("return frobload.files.safe_open(path)", "frobload"),
        ("return self.safe_open(path)", None),
        ("return torch.safe_open(path)", None),
        ("return safe_open(path)", None),
    ],
)
def test_the_package_that_refuses_a_call_is_read_from_the_line_of_code(
    code: str, callee: str | None
) -> None:
    message = "safe_open.__init__() got an unexpected keyword argument 'frob'"
    frames = ("vllm/model_executor/model_loader/weight_utils.py:frob_weights_iterator",)
    shape = ExceptionShape("TypeError", message, frames, "load", code)
    assert CURES.shape_circumstances(shape).get("callee") == callee


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report["source"])
def test_the_first_steps_of_a_public_report_help(report: dict[str, Any]) -> None:
    failure, helpful = measure(report, SIGNATURES)
    # Where the kind is not right today, `kind` has the one that is told.
    assert failure.kind in (report["kinds"] if "kind" not in report else [report["kind"]])
    assert helpful >= report.get("least", 2), failure.steps


@pytest.mark.parametrize(
    ("line", "capability"),
    [
        ("set_mempolicy: Operation not permitted", "SYS_NICE"),
        ("pidfd_getfd: Operation not permitted", "SYS_PTRACE"),
        ("mlockall failed: Operation not permitted", "IPC_LOCK"),
        ("unshare failed: Operation not permitted", "SYS_ADMIN"),
    ],
)
def test_a_refused_system_call_names_the_capability_that_allows_it(
    line: str, capability: str
) -> None:
    wrapper = "RuntimeError: Engine core initialization failed. See root cause above."
    failure = read(line, "Traceback (most recent call last):", wrapper, engine="vllm==0.33.0")
    assert failure.kind == "permission"
    assert f"--cap-add {capability}" in failure.steps[0]


def test_a_refused_system_call_is_no_cause_beside_another_error() -> None:
    log = ["get_mempolicy: Operation not permitted", "KeyError: 'frob'"]
    assert read(*log, engine="vllm==0.33.0").kind != "permission"


def test_a_row_with_one_step_gets_the_general_steps_of_its_kind() -> None:
    failure = read("exec /usr/bin/python3: exec format error")
    assert failure.kind == "platform"
    assert len(failure.steps) >= 2


def test_the_requests_of_a_message_follow_the_steps_of_its_row() -> None:
    failure = read(
        "Traceback (most recent call last):",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests."
        " Please try lowering `max_num_seqs` or `max_loras`.",
        engine="vllm==0.33.0",
    )
    assert "Lower --max-loras." in failure.steps
    # Another step of the row names this flag, with more details.
    assert "Lower --max-num-seqs." not in failure.steps


@pytest.mark.parametrize(
    ("line", "frames", "first", "never"),
    [
        (
            "RuntimeError: Prefill out of memory. Try to lower your batch size.",
            ["sglang/srt/managers/scheduler.py:event_loop_normal"],
            "Allow fewer concurrent requests",
            "Lower --mem-fraction-static",
        ),
        (
            "RuntimeError: Failed: CUDA error /src/DeepEP/csrc/kernels/intranode.cu:98 'frob'",
            ["sglang/srt/layers/moe/token_dispatcher/deepep.py:_run", "deep_ep/buffer.py:run"],
            "Exchange tokens without DeepEP",
            "NVSHMEM_HCA_LIST",
        ),
        (
            "RuntimeError: no prefill kernel for num_qo_heads=12",
            ["sglang/srt/layers/attention/frob_backend.py:forward", "flashinfer/mla/frob.py:run"],
            "Use another tensor parallel size",
            "another attention backend",
        ),
        (
            "IndexError: index 70000 is out of bounds for dimension 1 with size 65536",
            ["sglang/srt/sampling/sampling_batch_info.py:apply_logits_bias"],
            "Refuse requests",
            "Use the other engine",
        ),
    ],
    ids=["no slots", "one machine", "heads", "tokens of a request"],
)
def test_a_step_that_cannot_change_the_failure_is_left_out(
    line: str, frames: list[str], first: str, never: str
) -> None:
    engine = "sglang==0.5.10.post1"
    report = {"engine": engine, "phase": "serving", "frames": frames, "raises": line}
    failure, _ = diagnose([log_of_row(report | {"served": True})], SIGNATURES, engine)
    assert failure.steps[0].startswith(first), failure.steps
    assert not any(never in step for step in failure.steps)


_ADVICE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB. GPU 0 has a total"
    " capacity of 23.68 GiB of which 318.75 MiB is free. If reserved but unallocated memory is"
    " large try setting {}=expandable_segments:True to avoid fragmentation."
)


@pytest.mark.parametrize(
    "variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
)
def test_a_setting_that_pytorch_advises_is_not_in_force(variable: str) -> None:
    advice = _ADVICE.format(variable)
    setting = f"INFO 05-07 09:00:01 [envs.py:10] {variable}=expandable_segments:True"
    assert "expandable_segments" in CURES.line_circumstances(setting)
    assert not CURES.line_circumstances(advice)
    failure = read(advice)
    assert failure.kind == "gpu_oom"
    assert not any("WSL" in step or "expandable" in step for step in failure.steps)
    assert any("expandable_segments:False" in step for step in read(setting, advice).steps)


def test_no_step_repeats_the_advice_beside_the_message() -> None:
    advice = "Read the whole log with `fitserve logs`."
    failure = Failure(kind="exited", phase="serving", message="It ended.", line="", advice=advice)
    steps = CURES.add_remedy(failure, {}).steps
    assert sum("fitserve logs" in step for step in steps) == 1, steps
    # Advice that no step repeats stays the first step.
    other_failure = failure.evolve(advice="Free memory.")
    assert CURES.add_remedy(other_failure, {}).steps[0] == "Free memory."
