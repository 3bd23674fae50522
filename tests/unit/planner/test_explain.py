"""The output of `fitserve plan` and `fitserve matrix` for people: within a terminal's width, whole
lines in a pipe, two sentences for mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.text_tables import print_table
from gateway.domain import ExpectedStart, Memory, Refusal, StartConditions, StartTime
from gateway.errors import FitserveError
from gateway.planner import explain
from gateway.planner.layer_tables import refusal_lines
from tests.conformance.layer_cases import QUANTS
from tests.support.program import app
from tests.support.published import config
from tests.support.versions import VLLM, VLLM_REF

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command in this process, in a terminal of so many columns; 0: in a pipe."""
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("FITSERVE_PROFILES_DIR", raising=False)

    def fitserve(*arguments: object, columns: int = 80) -> Result:
        monkeypatch.setenv("COLUMNS", str(columns or ""))
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return fitserve


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return model(tmp_path / "qwen", "qwen3.6-35b-a3b", "auto-round-language")


def model(folder: Path, name: str, quant: str = "") -> Path:
    folder.mkdir()
    block = {"quantization_config": QUANTS[quant]} if quant else {}
    (folder / "config.json").write_text(json.dumps(config(name, **block)))
    return folder


def wide(result: Result, columns: int) -> list[str]:
    """Lines that are too long; the engine's variables and flags are one line to be copied, and a
    path cannot be broken."""
    lines = result.stdout.splitlines()
    return [
        line
        for line in lines
        if len(line) > columns and not re.match(r"([A-Z_]+=\S* )*--", line) and "/" not in line
    ]


def test_a_plan_keeps_to_eighty_columns(run: Run, qwen: Path) -> None:
    blind = ("--arg", 'limit-mm-per-prompt={"image": 0, "video": 0}')
    result = run("plan", qwen, "--hardware", "2x3090", "--engine", "vllm==0.19.1", "--all", *blind)
    assert result.exit_code == 0, result.output
    assert not wide(result, 80)
    text = result.stdout
    assert "2 copies of vllm==0.19.1 on 1 GPU each, 32,768 tokens of context" in " ".join(
        text.split()
    )
    assert "Kernels per rank of language_model.model.layers.*\n" in text
    assert (
        "linear_attn.in_proj_ba x30          2048 x 64     wna16 4-bit g128  Marlin (1)\n" in text
    )
    assert (
        "(1) the first in the engine's order that takes these layers: CutlassW4A8, Machete,"
        " AllSpark, Marlin, Conch, Exllama; CutlassW4A8, Machete: runs on compute capability 9.0"
        in " ".join(text.split())
    )
    assert re.search(r"\n\[W+a*g*o*K+\.+\] 24\.00 GiB\nW weights", text)
    assert re.search(r"\n2     2     TP=1 PP=2  32,768   [\d.]+ +[\d.,]+ +vllm==0.19.1:", text)
    assert re.search(
        r"\n3     2     TP=2       32,768   [\d.]+ +[\d.,]+\s+vllm==0.19.1:\s+float16"
        r"\s+activations,\s+without\s+image,\s+video\s+\(degraded\)\n",
        text,
    )
    assert re.search(r"\n32 concurrent     [\d,]+ \([\d,]+ to [\d,]+\) tokens/s in all\n", text)
    assert "\n  no_kernel: vllm==0.19.1 TP=2\n" in text
    assert "\n      Marlin: N=32 is not a multiple of 64 (32 over)\n" in text
    assert "\x1b" not in text
    all_gpus = ("--gpus", "all", "--all")
    roomy = run("plan", qwen, "--hardware", "2x5090", "--engine", "vllm==0.19.1", *all_gpus).stdout
    assert "2 copies of vllm==0.19.1 on 1 GPU each, 32,768 tokens of context" in " ".join(
        roomy.split()
    )


@pytest.mark.parametrize("columns", [40, 56, 120])
def test_every_width_is_kept(run: Run, qwen: Path, columns: int) -> None:
    arguments = ("plan", qwen, "--hardware", "2x3090", "--engine", "vllm")
    for output in (run(*arguments, columns=columns), run(*arguments, "--all", columns=columns)):
        assert not [line for line in wide(output, columns) if " " in line.strip() and columns > 56]
        assert max(
            len(line) for line in output.stdout.splitlines() if line.startswith("[W")
        ) <= max(columns, 40)


def test_a_pipe_has_a_line_for_each_row(run: Run, qwen: Path) -> None:
    arguments = ("plan", qwen, "--hardware", "2x3090", "--engine", "vllm==0.19.1", "--all")
    result = run(*arguments, columns=0)
    lines = result.stdout.splitlines()
    assert any(line.startswith("speculation") and "measure it (planner)" in line for line in lines)
    assert not any(line.endswith(" ") for line in lines)


def test_the_short_plan_has_speed_and_memory_before_choices_and_counts_the_defaults(
    run: Run, qwen: Path
) -> None:
    arguments = ("plan", qwen, "--hardware", "2x3090", "--engine", "vllm==0.19.1")
    short = run(*arguments, columns=0).stdout.splitlines()
    full = run(*arguments, "--all", columns=0).stdout.splitlines()
    places = [
        next(number for number, line in enumerate(short) if line.startswith(title))
        for title in ("Expected speed", "Memory per device", "CHOICE", "Engine flags", "Plans by")
    ]
    assert places == sorted(places)
    rows, all_rows = choice_rows(short), choice_rows(full)
    assert set(rows) < set(all_rows)
    (count,) = [line for line in short if "choices are defaults" in line]
    assert count.startswith(f"{len(all_rows) - len(rows)} of {len(all_rows)} choices")
    assert "`--all` shows them" in count
    assert {"engine", "max model len", "quantization"} <= {line.split("  ")[0] for line in rows}
    assert "Kernels: " in "\n".join(short)
    assert "Kernels per rank" not in "\n".join(short)
    counts: dict[str, int] = {}
    for rejection in json.loads(run(*arguments, "--json").stdout)["rejected"]:
        counts[rejection["verdict"]] = counts.get(rejection["verdict"], 0) + 1
    (line,) = [line for line in short if line.startswith("Rejected: ")]
    assert all(f"{verdict} {count}" in line for verdict, count in counts.items())


def choice_rows(lines: list[str]) -> list[str]:
    """The rows of the table of choices."""
    ends = ("Kernels: ", "Attention: ")
    begin = next(number for number, line in enumerate(lines) if line.startswith("CHOICE")) + 1
    rows = takewhile(lambda line: line and not line.startswith(ends), lines[begin:])
    return list(rows)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--tp", "1"), "tensor parallel"),
        (("--arg", "max-num-seqs=256"), "max num seqs"),
        (("--arg", "dtype=bfloat16"), "dtype"),
        (("--speculative", "off"), "speculation"),
        (("--arg", "kv-cache-dtype=auto"), "kv cache dtype"),
        (("--arg", "enforce-eager=false"), "enforce eager"),
    ],
)
def test_a_value_that_the_user_set_is_shown_even_where_it_is_the_default(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], name: str
) -> None:
    folder = model(tmp_path / "llama", "llama-3.2-1b")
    common = ("plan", folder, "--hardware", "3090", "--engine", VLLM_REF)
    assert name not in names_of(run(*common, columns=0))
    assert name in names_of(run(*common, *arguments, columns=0))


def names_of(result: Result) -> set[str]:
    return {line.split("  ")[0] for line in choice_rows(result.stdout.splitlines())}


def test_no_plan_is_exit_code_3_with_rejections_and_next_steps(run: Run, qwen: Path) -> None:
    result = run("plan", qwen, "--hardware", "2x3090", "--engine", "vllm", "--tp", "3")
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert lines[0].startswith("No plan for")
    text = " ".join(result.stdout.split())
    assert "2x3090. 3 GPUs are needed, and the machine has 2. Leave out `--tp`: vllm==" in text
    assert "3 GPUs are needed, and the machine has 2 (probe)" in result.stdout
    assert text.count("TP=3") == 1
    assert text.count(", 0.") == len(VLLM) - 1
    document = json.loads(
        run("plan", qwen, "--hardware", "2x3090", "--engine", "vllm", "--tp", "3", "--json").stdout
    )
    assert document["plans"] == []
    assert {rejection["verdict"] for rejection in document["rejected"]} == {"no_device"}


def test_a_context_beyond_the_models_own_is_not_blamed_on_memory(run: Run, qwen: Path) -> None:
    result = run(
        "plan", qwen, "--hardware", "8xh100", "--engine", VLLM_REF, "--min-context", "9999999"
    )
    assert result.exit_code == 3
    words = " ".join(result.stdout.split())
    assert "the model's own limit is 32768" in words
    assert "more GPUs" not in words
    assert "Forms of the model" not in words


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ("plan", "{qwen}", "--hardware", "6x3091"),
            1,
            "No machine or card is named 6x3091; did you mean 8x3090? `fitserve plan --hardware",
        ),
        (
            ("plan", "{qwen}", "--hardware", "/no/such.json"),
            2,
            "snapshot /no/such.json cannot be read: No such file",
        ),
        (("plan", "{qwen}", "--hardware", "{qwen}/config.json"), 2, "is not a hardware snapshot"),
        (
            ("plan", "{qwen}", "--engine", "vllm==newest", "--hardware", "3090"),
            1,
            "There is no profile for the engine vllm==newest. The nearest known one is vllm==",
        ),
        (
            ("plan", "{qwen}", "--engine", "vlm", "--hardware", "3090"),
            1,
            "There is no engine vlm. Known kinds: sglang, vllm",
        ),
        (
            ("plan", "{qwen}", "--arg", "max-model-length=5", "--hardware", "3090"),
            2,
            "did you mean max-model-len?",
        ),
        (
            ("plan", "{qwen}", "--arg", "gpu-memory-utilization=5", "--hardware", "3090"),
            2,
            "at least 0.01 and at most 1",
        ),
        (
            ("plan", "{qwen}", "--speculative", "magic", "--hardware", "3090"),
            2,
            "'auto', 'off', 'mtp' or 'ngram'",
        ),
        (
            ("plan", "/no/model", "--hardware", "3090"),
            1,
            "There is no folder /no/model. Give the folder",
        ),
        (
            ("plan", "model", "--hardware", "3090"),
            1,
            "neither a model folder nor a Hugging Face repository",
        ),
        (
            ("plan", "{qwen}", "--drafter", "/no/drafter", "--hardware", "3090"),
            1,
            "There is no folder /no/drafter.",
        ),
        (
            ("matrix", "{qwen}", "--hardware", "3090,abacus"),
            1,
            "No machine or card is named abacus",
        ),
    ],
)
def test_mistakes_are_one_or_two_sentences(
    run: Run, qwen: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = run(*(argument.format(qwen=qwen) for argument in arguments))
    # The command's `main` prints such an error and ends with its code.
    assert isinstance(result.exception, FitserveError)
    assert result.exception.exit_code == code
    assert words in str(result.exception)
    assert str(result.exception).count(". ") <= 2
    assert not result.stdout


def test_a_matrix_needs_a_machine(run: Run, qwen: Path) -> None:
    result = run("matrix", qwen, "--hardware", ",")
    assert result.exit_code == 2
    assert "names no machine" in result.stderr


def test_a_matrix_says_which_combinations_run_and_why_not(
    run: Run, tmp_path: Path, qwen: Path
) -> None:
    crash = model(tmp_path / "gpt-oss", "gpt-oss-20b", "mxfp4-ct")
    arguments = (
        "matrix",
        crash,
        qwen,
        "--hardware",
        "2x3090,gb10",
        "--engine",
        "vllm==0.18.0",
        "--engine",
        "vllm==0.19.1",
    )
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert not wide(result, 86)
    rows = [line.split() for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert rows[0][:6] == ["MODEL", "HARDWARE", "ENGINE", "STATE", "LAYOUT", "CONTEXT"]
    assert ["gpt-oss", "2x3090", "vllm==0.18.0", "runtime_fail", "TP=2"] in rows
    assert ["qwen", "gb10", "vllm==0.19.1", "ok", "TP=1", "32,768"] in [row[:6] for row in rows]
    assert len(rows) == 9
    assert "    as above\n" in result.stdout
    lines = run(*arguments, columns=0).stdout.splitlines()
    assert len(lines) == 9
    assert all("would crash" in line for line in lines if "runtime_fail" in line)
    cells = json.loads(run(*arguments, "--json").stdout)
    assert {(cell["state"], cell["verdict"]) for cell in cells} == {
        ("failing", "runtime_fail"),
        ("ok", "ok"),
    }


def test_a_matrix_without_any_plan_is_exit_code_3(run: Run, tmp_path: Path) -> None:
    crash = model(tmp_path / "gpt-oss", "gpt-oss-20b", "mxfp4-ct")
    assert (
        run("matrix", crash, "--hardware", "rtx-pro-6000", "--engine", "vllm==0.18.0").exit_code
        == 3
    )


def test_two_models_of_one_name_are_distinguished(run: Run, tmp_path: Path) -> None:
    folders = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        folders.append(model(tmp_path / name / "same", "llama-3.2-1b"))
    result = run("matrix", *folders, "--hardware", "3090", "--engine", VLLM_REF, columns=0)
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == [
        str(folder) for folder in folders
    ]


def test_the_words_of_a_model_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("A", "B"), [("\x1b[2Jx\r\n", "\ud800")])
    assert capsys.readouterr().out == "A                 B\n\\x1b[2Jx\\x0d\\x0a  \\ud800\n"


def test_the_bar_of_memory_covers_the_whole_device() -> None:
    sizes = {
        "gpu_bytes": 100,
        "budget_bytes": 90,
        "kv_bytes_per_token": 1,
        "kv_tokens": 30,
        "low": 1,
        "high": 2,
    }
    memory = Memory(
        weights_bytes=40,
        activation_bytes=10,
        graph_bytes=0,
        overhead_bytes=10,
        kv_bytes=30,
        **sizes,
    )
    assert explain.memory_bar(memory, 10) == "[WWWWaoKKK.] 0.00 GiB"
    assert explain.memory_bar(memory.evolve(kv_bytes=500), 10) == "[WWWWaoKKKK] 0.00 GiB"
    assert [row[0] for row in explain.memory_rows(memory)] == [
        "W weights",
        "a activations",
        "o overhead",
        "K KV cache",
        "budget",
        "without K",
    ]


def test_kernels_that_refuse_for_the_same_reason_are_reported_once() -> None:
    refusals = (
        Refusal(kernel="MacheteLinearKernel", reason="too old"),
        Refusal(kernel="", reason="cannot be cut"),
        Refusal(kernel="CutlassW4A8LinearKernel", reason="too old"),
    )
    assert refusal_lines(refusals) == ["Machete, CutlassW4A8: too old", "cannot be cut"]


def test_the_expected_start_has_its_phases_and_its_source() -> None:
    warm = StartConditions(origin="fork", is_cache_empty=False)
    time = StartTime(
        phases={"import": 1.5, "load": 12.0}, low_s=12.0, high_s=20.0, starts=5, grade="measured"
    )
    assert explain.start_rows(ExpectedStart(conditions=warm, time=time)) == [
        ("importing the engine", "1.5 s"),
        ("loading weights", "12 s"),
        ("in all", "12 s to 20 s"),
        ("by", "the last 5 starts of this plan here, by a fork of the prepared process"),
    ]
    cold = StartConditions(origin="container", is_cache_empty=True)
    assert explain.start_rows(ExpectedStart(conditions=cold)) == [
        ("by", "no start like it was measured, in a container, nothing is compiled yet")
    ]
