"""The advice in a message: read by its form, with flags that the engine has."""

import re

import pytest

from gateway.diagnosis.advice import KnownFlags, advice_of_message, distribution_name
from gateway.diagnosis.diagnose import diagnose
from gateway.profiles.profiles import Profiles
from tests.support.cure_reports import REPORTS

NAMES = Profiles().signatures.cures.rows.names
VARIABLES = frozenset({"VLLM_FROB_WORKSPACE_BUFFER_SIZE", "VLLM_FROB_SIZE"})
FLAGS = {
    kind: KnownFlags(NAMES(kind, "flags")[version], is_complete=True, variables=VARIABLES)
    for kind, version in (("vllm", "0.33.0"), ("sglang", "0.5.23"))
}
PACKAGES = frozenset({"vllm", "frob-cache", "frob", "frobinfer", "frobcore", "frobtok"})
SHIPPED = Profiles().signatures.cures.rows.packages
UNKNOWN = (
    "Use the engine's image, or look the package of the line up before you install it: no described"
    " engine names it."
)


@pytest.mark.parametrize(
    ("kind", "message", "steps"),
    [
        (
            "vllm",
            "max_num_batched_tokens (512) is smaller than max_model_len (4096).",
            [
                "Raise --max-num-batched-tokens to at least 4096.",
                "Lower --max-model-len to at most 512.",
            ],
        ),
        (
            "vllm",
            "max_num_seqs (64) must be at least data_parallel_size (128)",
            ["Raise --max-num-seqs to at least 128.", "Lower --data-parallel-size to at most 64."],
        ),
        (
            "vllm",
            "frob_rows (64) is larger than max_num_seqs (8)",
            ["Raise --max-num-seqs to at least 64."],
        ),
        (
            "sglang",
            "Raise --chunked-prefill-size to at least 4096.",
            ["Raise --chunked-prefill-size to at least 4096."],
        ),
        (
            "sglang",
            "Please set a smaller number for `--max-running-requests`.",
            ["Lower --max-running-requests."],
        ),
        ("vllm", "Try increasing `gpu_memory_utilization`.", ["Raise --gpu-memory-utilization."]),
        (
            "sglang",
            "Frob needs another GPU. Please use `--attention-backend flashinfer`.",
            ["Set --attention-backend=flashinfer: the line asks for it."],
        ),
        (
            "vllm",
            "The buffer is full. Increase the workspace buffer size.",
            ["Raise VLLM_FROB_WORKSPACE_BUFFER_SIZE."],
        ),
        ("vllm", "Please reduce the max model length.", ["Lower --max-model-len."]),
        ("vllm", "Please reduce the size.", []),
        ("vllm", "Frob increases the block size.", []),
        ("vllm", "You can increase the workspace memory.", []),
        (
            "vllm",
            "Not with this one. To fix use --all2all-backend=frob or --all2all-backend=frab.",
            ["Set --all2all-backend=frob or frab: the line asks for it."],
        ),
        (
            "vllm",
            "Set VLLM_FROB_CHECK=0 to go on.",
            ["Set VLLM_FROB_CHECK=0: the line asks for it."],
        ),
        ("vllm", "To wait longer, set VLLM_FROB_S.", ["Set VLLM_FROB_S: the line asks for it."]),
        ("vllm", "To increase the time, set VLLM_FROB_S.", ["Raise VLLM_FROB_S."]),
        (
            "vllm",
            "Frob is not supported when using --enable-lora.",
            ["Omit --enable-lora: the line says so."],
        ),
        (
            "vllm",
            "--enable-lora is not supported by frob.",
            ["Omit --enable-lora: the line says so."],
        ),
        ("vllm", "Do not use --enable-lora here.", ["Omit --enable-lora: the line says so."]),
        (
            "sglang",
            "Frob needs --speculative-draft-model-path.",
            ["Set --speculative-draft-model-path: the line asks for it."],
        ),
        (
            "vllm",
            "--tokenizer-mode must be set for frob.",
            ["Set --tokenizer-mode: the line asks for it."],
        ),
        (
            "vllm",
            "Please install vllm[frob] for frobs.",
            ["Install vllm[frob] in the engine's environment."],
        ),
        (
            "vllm",
            "Run `pip install -U frobinfer frobcore` first",
            ["Install frobinfer frobcore in the engine's environment."],
        ),
        (
            "vllm",
            "frobtok >= 0.2.0 is required when VLLM_USE_FROB=1.",
            [
                "Install frobtok>=0.2.0 in the engine's environment.",
                "Unset VLLM_USE_FROB: the line says so.",
            ],
        ),
        (
            "sglang",
            "frob-cache version (0.6.7) does not match frob version (0.6.8).",
            ["Install frob-cache in the version of frob, 0.6.8."],
        ),
        ("vllm", "Please delete ~/.cache/frob and start again.", ["Remove ~/.cache/frob."]),
    ],
)
def test_advice_in_a_message_is_a_step(kind: str, message: str, steps: list[str]) -> None:
    assert list(advice_of_message(message, FLAGS[kind], PACKAGES)) == steps


@pytest.mark.parametrize(
    "message",
    [
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Compile with `TORCH_USE_CUDA_DSA` to enable assertions.",
        "Cannot unify by adjusting block_size.",
        "Please pass --trust-remote-code.",
        "Please use --frob-that-no-version-has.",
        "The frob_size (3) is smaller than grid_size (4).",
        "The engine was started with max_num_seqs=4.",
        "Please install the dependencies.",
        "",
    ],
)
def test_a_cause_or_an_unknown_option_is_no_step(message: str) -> None:
    assert advice_of_message(message, FLAGS["vllm"], PACKAGES) == ()


def test_an_undescribed_engine_accepts_any_flag_in_at_most_three_steps() -> None:
    message = "Set --frob-a. Set --frob-b. Set --frob-c. Set --frob-d."
    assert len(advice_of_message(message, KnownFlags(), ())) == 3
    assert advice_of_message(message, FLAGS["sglang"], ()) == ()


@pytest.mark.parametrize("kind", sorted(FLAGS))
def test_every_flag_of_a_step_is_one_of_the_engine(kind: str) -> None:
    """Over all messages of the kept reports, with the flags of either engine."""
    names = FLAGS[kind].names
    flag_names = frozenset(name for row in SHIPPED for name in row.names)
    steps = [
        step
        for report in REPORTS
        for step in advice_of_message(report.get("raises", ""), FLAGS[kind], flag_names)
    ]
    assert len(steps) > 15
    for step in steps:
        for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", step):
            assert {flag, flag.removeprefix("no-")} & names, step


@pytest.mark.parametrize(
    ("message", "step"),
    [
        ("Please `pip install frobmodel-tools` first", UNKNOWN),
        ("Run pip install -U --pre frobmodel_tools==0.2 to load this model.", UNKNOWN),
        ("pip install --index-url http://frob.example/simple frob", UNKNOWN),
        ("pip install git+https://frob.example/tools.git", UNKNOWN),
        ("Please install frobmodel-tools for this model.", None),
        ("frobmodel-tools>=2.0 is required.", None),
        ("frobmodel version (1.0) does not match vllm version (0.33.0).", None),
        (
            "pip install FrobInfer frobmodel-tools",
            "Install FrobInfer in the engine's environment.",
        ),
    ],
)
def test_a_package_that_no_engine_names_is_never_advised(message: str, step: str | None) -> None:
    """A repository's author chooses words of some messages, and could own the package."""
    assert advice_of_message(message, FLAGS["vllm"], PACKAGES) == (() if step is None else (step,))


def test_words_of_a_model_in_an_engines_error_name_no_package() -> None:
    log = (
        "(EngineCore pid=7) ImportError: This modeling file requires the following packages that"
        " were not found in your environment: frobmodel_tools. Run `pip install frobmodel_tools`"
    )
    failure = diagnose([log.encode()], Profiles().signatures, "vllm")[0]
    assert not any("frobmodel" in step for step in failure.steps)


def test_every_shipped_name_is_one_of_a_distribution_and_engines_have_theirs() -> None:
    names = frozenset(name for row in SHIPPED for name in row.names)
    for name in names:
        assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", name), name
        assert distribution_name(name) == name
    assert {"vllm", "sglang", "transformers", "flashinfer-python", "bitsandbytes"} <= names
