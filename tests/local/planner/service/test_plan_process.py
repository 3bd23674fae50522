"""gateway.planner.service: a model folder is read in a process of its own, whose end is an error of
that one request."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import Decision
from gateway.domain.plan_request import PlanRequest, PlanResult
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.errors import BadFlag, BadModel, Busy, FitserveError, NeedsRemoteCode, NoPlan, NotFound
from gateway.hosts.process.host import ProcessHost
from gateway.machine.gpu_watch import GpuWatch
from gateway.models.catalog.hub import Hub
from gateway.planner.service import plan_process
from gateway.planner.service.machine_planner import MachinePlanner
from gateway.planner.service.messages import (
    HEADER_BYTES,
    LENGTH,
    MEMORY_BYTES,
    PROCESSOR_S,
    WorkerConfig,
)
from gateway.planner.service.offline import OfflinePlanner
from gateway.planner.service.plan_process import MAX_WAITING_PLANS, PlanProcess
from gateway.profiles.profiles import Profiles
from gateway.secret import Secret
from tests.support.fake_hub import COMMIT, FakeHub, FakeRepo
from tests.support.fake_nvml import FakeNvml
from tests.support.makers import wish
from tests.support.model_files import CONFIG, model, write
from tests.support.paths import ROOT
from tests.support.patience import HANG_S, hang_s
from tests.support.versions import NEWEST_VLLM, VLLM_REF

pytestmark = pytest.mark.anyio

TOKEN = "hf_secret_of_the_test"


@asynccontextmanager
async def planning(
    tmp_path: Path,
    hub: FakeHub | None = None,
    *,
    installed_only: bool = False,
    allowed: tuple[str, ...] | None = None,
) -> AsyncIterator[MachinePlanner]:
    roots = tuple(map(str, Profiles().roots))
    url = Secret(hub.url() if hub is not None else "http://127.0.0.1:9")
    process = PlanProcess(
        WorkerConfig(roots, str(tmp_path / "data"), url, Secret(TOKEN), installed_only, allowed)
    )
    try:
        inquirer = Inquirer(ProcessHost(tmp_path / "data"), AnswerCache(tmp_path / "answers"))
        yield MachinePlanner(
            tmp_path / "data", process, GpuWatch(FakeNvml([])), inquirer, Profiles(), None
        )
    finally:
        await process.close()
        assert children() == []


def children(pid: int | None = None) -> list[int]:
    pid = pid or os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def proc_file(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


async def make_plan(planner: MachinePlanner, folder: Path | str, **fields: Any) -> PlanResult:
    hardware = fields.pop("hardware", "2x3090")
    ask = planner.preview if fields.pop("previews", False) else planner.plan
    async with asyncio.timeout(hang_s()):
        return await ask(PlanRequest(wish(source=str(folder), **fields), machine_name=hardware))


async def refusal(
    planner: MachinePlanner, folder: Path | str, kind: type[FitserveError] = BadModel, **fields: Any
) -> str:
    with pytest.raises(FitserveError) as error:
        await make_plan(planner, folder, **fields)
    assert type(error.value) is kind
    assert error.value.hint or "did you mean" in error.value.message, "every error says what to do"
    return error.value.message


async def test_the_plan_is_that_of_a_planner_in_this_process(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model())
    async with planning(tmp_path) as planner:
        plan = await make_plan(planner, folder)
        await make_plan(planner, folder)
        (child,) = children()
        assert os.getpriority(os.PRIO_PROCESS, child) > os.getpriority(os.PRIO_PROCESS, 0), (
            "streams go first"
        )
    own_decision = OfflinePlanner(Profiles(), Hub(None, None, tmp_path)).decide(
        wish(source=str(folder)), "2x3090"
    )
    assert Decision.model_validate_json(plan.decision) == own_decision
    assert plan.plan == own_decision.plans[0]
    assert plan.reason == ""


async def test_a_plan_follows_the_classes_of_keys(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model())
    async with planning(tmp_path) as planner:
        orders = []
        for classes in (1, 2):
            watch = GpuWatch(FakeNvml([]), lambda _: planner.profiles.hardware("2x3090"))
            asker = replace(planner, gpus=watch, key_classes=partial(int, classes))
            async with asyncio.timeout(hang_s()):
                model_wish = wish(source=str(folder), engines=(VLLM_REF,))
                result = await asker.plan(PlanRequest(model_wish))
            assert result.plan is not None
            orders.append(result.plan.request_order.value)
            is_ordered = "--scheduling-policy=priority" in result.plan.argv
            assert is_ordered == (classes == 2)
        assert orders == ["arrival", "priority"]


async def test_a_plan_tells_its_commits_and_takes_those_of_its_wish(
    tmp_path: Path,
) -> None:
    new_commit = "f" * 40
    with FakeHub({"org/name": FakeRepo(model()), "org/drafter": FakeRepo(model())}) as hub:
        async with planning(tmp_path, hub) as planner:
            first_plan = await make_plan(planner, "org/name", drafter="org/drafter")
            assert first_plan.commits == {"org/name": COMMIT, "org/drafter": COMMIT}
            for repo in hub.repos.values():
                repo.commit, repo.older = new_commit, (COMMIT,)
            hub.requests.clear()
            second_plan = await make_plan(
                planner, "org/name", drafter="org/drafter", commits=first_plan.commits
            )
            assert second_plan.commits == first_plan.commits
            assert not [request for request in hub.requests if request.path.startswith("/api/")]
            plan = await make_plan(planner, "org/name", revision="main")
            assert plan.commits == {"org/name@main": new_commit}


async def test_a_gateway_that_held_much_memory_keeps_its_process(tmp_path: Path) -> None:
    large_body = b"x" * 2**29
    folder = write(tmp_path / "model", model())
    async with planning(tmp_path) as planner:
        await make_plan(planner, folder)
        first_children = children()
        await make_plan(planner, folder)
        assert children() == first_children != []
    assert len(large_body) == 2**29


async def test_an_error_keeps_its_class_across_the_process(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model())
    foreign = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    code = write(
        tmp_path / "code",
        {**model(model_type="nemotron-nas", auto_map=foreign), "modeling_x.py": b""},
    )
    async with planning(tmp_path, installed_only=True) as planner:
        assert "There is no folder" in await refusal(planner, tmp_path / "nothing")
        assert "code of its own" in await refusal(planner, code, NeedsRemoteCode)
        assert "engine nothing" in await refusal(planner, folder, NotFound, engines=["nothing"])
        assert "No machine or card is named" in await refusal(
            planner, folder, NotFound, hardware="nothing"
        )
        assert "max-model-lem" in await refusal(planner, folder, BadFlag, args={"max-model-lem": 1})
        assert "cannot be reached" in await refusal(planner, "org/name")
        with pytest.raises(FitserveError, match="No engine that could serve m is installed here"):
            await planner.plan(PlanRequest(wish(source=str(folder))))
        assert (await make_plan(planner, folder, engines=["vllm"])).plan is not None
        narrow = await make_plan(planner, folder, engines=["vllm"], min_context=10**9)
    assert narrow.plan is None
    assert "A context of at least 1000000000 tokens was asked for" in narrow.reason


async def test_only_images_that_may_be_started_are_planned(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model())
    async with planning(
        tmp_path, allowed=("lmsysorg/sglang", "vllm/vllm-openai:v0.26.0")
    ) as planner:
        decision = json.loads((await make_plan(planner, folder)).decision)
        images = {
            plan_row["engine"]["image"] for plan_row in [*decision["plans"], *decision["rejected"]]
        }
        assert {image.partition(":")[0] for image in images} == {
            "lmsysorg/sglang",
            "vllm/vllm-openai",
        }
        assert [image for image in images if image.startswith("vllm")] == [
            "vllm/vllm-openai:v0.26.0"
        ]
        assert f"'vllm/vllm-openai:v{NEWEST_VLLM}' may not be started" in await refusal(
            planner, folder, NoPlan, engines=[VLLM_REF]
        )


async def test_facts_and_claims_are_planned_with(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model())
    async with planning(tmp_path) as planner:
        best = (await make_plan(planner, folder)).plan
        assert best is not None
        fact = {
            "kind": "plan_failed",
            "scope": {"fingerprint": best.fingerprint},
            "grade": "failed",
            "source": "a line",
        }
        model_wish = wish(source=str(folder))
        request = PlanRequest(model_wish, machine_name="2x3090")
        planner_with_facts = replace(planner, facts=lambda: (json.dumps(fact),))
        plan_after = (await planner_with_facts.plan(request)).plan
        assert plan_after is not None
        assert plan_after.fingerprint != best.fingerprint
        uuids = [gpu.uuid for gpu in Profiles().hardware("2x3090").gpus]
        promised_bytes = dict.fromkeys(uuids[:1], 2**34)
        plan_with_claims = (
            await planner.plan(replace(request, promised_bytes=promised_bytes))
        ).plan
    assert plan_with_claims is not None
    assert plan_with_claims.gpus == (uuids[1],)


def deep(folder: Path) -> Path:
    """Within the bytes that a config.json may have, and more memory than reading may take."""
    config = (
        json.dumps(CONFIG)[:-1] + ', "x": [' + '{"a":[]},' * ((16 * 2**20 - 10_000) // 9) + "1]}"
    )
    return write(folder, {"config.json": config.encode()})


async def test_more_memory_than_may_be_taken_is_an_error_of_that_model_alone(
    tmp_path: Path,
) -> None:
    good, bad = write(tmp_path / "good", model()), deep(tmp_path / "bad")
    async with planning(tmp_path) as planner:
        await make_plan(planner, good)
        (first,) = children()
        # A lower limit than its own, so that the test takes less.
        resource.prlimit(first, resource.RLIMIT_AS, (500_000_000, 500_000_000))
        assert "of memory that they may take" in await refusal(planner, bad)
        assert children() == []
        assert (await make_plan(planner, good)).plan is not None


@pytest.fixture
def stalled_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub whose config.json does not come: a plan that waits for it is under way."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FakeHub({"org/name": FakeRepo(model())}, stalls={"config.json": 0}) as hub:
        yield hub


@asynccontextmanager
async def under_way(
    planner: MachinePlanner, hub: FakeHub
) -> AsyncIterator[asyncio.Task[PlanResult]]:
    task = asyncio.create_task(make_plan(planner, "org/name"))
    try:
        await until(hub.stalled.is_set)
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, FitserveError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(hang_s()):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        (signal.SIGXCPU, "took more than 60 seconds of processor time"),
        (signal.SIGKILL, "ended by SIGKILL"),
        (signal.SIGABRT, "ended by SIGABRT"),
    ],
)
async def test_a_process_that_ends_while_it_plans_is_replaced(
    tmp_path: Path, stalled_hub: FakeHub, ends: signal.Signals, says: str
) -> None:
    async with planning(tmp_path, stalled_hub) as planner:
        async with under_way(planner, stalled_hub) as task:
            (child,) = children()
            os.kill(child, ends)
            with pytest.raises(BadModel, match=says):
                await task
        assert (await make_plan(planner, write(tmp_path / "good", model()))).plan is not None
        assert children() != [child]


async def test_the_kernel_is_told_the_limit_of_processor_time_of_each_request(
    tmp_path: Path,
) -> None:
    async with planning(tmp_path) as planner:
        await make_plan(planner, write(tmp_path / "good", model()))
        (child,) = children()
        limits, oom = proc_file(child, "limits"), proc_file(child, "oom_score_adj")
    soft = int(limits.partition("Max cpu time")[2].split()[0])
    assert PROCESSOR_S < soft < PROCESSOR_S + HANG_S
    assert limits.partition("Max address space")[2].split()[0] == str(MEMORY_BYTES)
    assert oom == "1000\n", "the kernel ends it before anything else"


async def test_a_plan_that_takes_too_long_is_ended(
    tmp_path: Path, stalled_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with planning(tmp_path, stalled_hub) as planner:
        await make_plan(planner, write(tmp_path / "good", model()))
        monkeypatch.setattr(plan_process, "PATIENCE_S", 2.0)
        assert "took longer than 2 seconds" in await refusal(planner, "org/name")
        assert children() == []


async def test_a_client_that_leaves_ends_the_reading(tmp_path: Path, stalled_hub: FakeHub) -> None:
    async with planning(tmp_path, stalled_hub) as planner:
        async with under_way(planner, stalled_hub) as task:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert children() == []


async def test_a_client_that_leaves_during_a_large_answer_ends_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flood = (
        f"import sys\nsays = sys.stdout.buffer.write\nsays({LENGTH.pack(HEADER_BYTES)!r})\nwhile"
        " True: says(bytes(65536))"
    )
    processes: list[Any] = []

    async def floods(*_: object) -> Any:
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        processes.append(await asyncio.create_subprocess_exec(sys.executable, "-c", flood, **pipes))  # type: ignore[arg-type]
        return processes[0]

    monkeypatch.setattr(plan_process, "spawn", floods)
    async with planning(tmp_path) as planner:
        task = asyncio.create_task(make_plan(planner, tmp_path))
        # asyncio stops to read where so much waits to be taken.
        async with asyncio.timeout(hang_s()):
            while not processes or len(processes[0].stdout._buffer) < 1 << 20:
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=HANG_S)
        assert task.cancelled()
        assert processes[0].returncode is not None


async def test_few_may_wait_and_the_others_are_told_to_come_back(
    tmp_path: Path, stalled_hub: FakeHub
) -> None:
    async with planning(tmp_path, stalled_hub) as planner, under_way(planner, stalled_hub):
        waiting = [
            asyncio.create_task(make_plan(planner, tmp_path)) for _ in range(MAX_WAITING_PLANS)
        ]
        await asyncio.sleep(0)
        assert f"busy: {MAX_WAITING_PLANS} requests are queued" in await refusal(
            planner, tmp_path, Busy, previews=True
        )
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def test_the_token_is_in_no_list_of_processes(
    tmp_path: Path, stalled_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITSERVE_HF_TOKEN", TOKEN)
    monkeypatch.setenv("FITSERVE_ADMIN_KEY", "a-key-that-is-nobody-elses")
    async with planning(tmp_path, stalled_hub) as planner, under_way(planner, stalled_hub):
        (child,) = children()
        lists = proc_file(child, "cmdline") + proc_file(child, "environ")
    assert "gateway.planner.service.plan_program" in lists
    assert TOKEN not in lists
    assert "FITSERVE_" not in lists
    assert {request.token for request in stalled_hub.requests if request.server == "hub"} == {
        f"Bearer {TOKEN}"
    }


async def test_the_process_ends_with_the_gateway(tmp_path: Path, stalled_hub: FakeHub) -> None:
    gateway = (
        "import asyncio; from gateway.domain.plan_request import PlanRequest; from"
        " gateway.planner.service.messages import *; from gateway.planner.service.plan_process"
        " import PlanProcess\nfrom gateway.profiles.profiles import Profiles; from"
        " tests.support.makers import wish\nprocess ="
        f" PlanProcess(WorkerConfig(tuple(map(str, Profiles().roots)), {str(tmp_path)!r},"
        f" {stalled_hub.url()!r}, None, False))\nasked = PlanRequest(wish(source='org/name'),"
        " machine_name='2x3090')\nasyncio.run(process.request_plan(asked, ()))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", gateway, cwd=ROOT)
    try:
        await until(stalled_hub.stalled.is_set)
        (child,) = children(process.pid)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    await until(
        lambda: (
            not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text()
        )
    )


async def test_an_answer_that_is_longer_than_any_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that a model took over may say anything."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nprintf '\\377\\377\\377\\377'\nexec sleep 1000\n")
    program.chmod(0o755)
    async with planning(tmp_path) as planner:
        monkeypatch.setattr(sys, "executable", str(program))
        assert "ended by SIGKILL" in await refusal(planner, tmp_path)
