"""Engines for GPUs, of which only the Python sources are here, asked about stated GPUs: each gives
its own answer to a reported failure.

Their imports are beside the CPU engine's own packages. Failure 000: Qwen3.6-35B-A3B in 4 bits of
AutoRound, on two GPUs of capability 8.6.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.domain import Engine, EngineAnswer, EngineRef, Question
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.engines.inquiry.inquiry_document import StatedGpus
from gateway.engines.inquiry.learned_profile import build_profile, store_profile
from gateway.hosts.process.asked_environment import run_inquiry_process
from gateway.planner.service import offline
from gateway.planner.service.engine_check import model_files
from gateway.planner.service.offline import OfflinePlanner
from gateway.profiles.profiles import Profiles
from tests.conformance.kept import DownloadFolder
from tests.conformance.layer_cases import QUANTS
from tests.e2e.conftest import ENGINE
from tests.support.makers import wish
from tests.support.paths import ROOT
from tests.support.patience import HANG_S
from tests.support.published import config
from tests.support.versions import SGLANG_REF, VLLM_REF

pytestmark = pytest.mark.engine

ASKED = {"vllm==0.19.1": (2, 1), "vllm==0.26.0": (2,), VLLM_REF: (2,), SGLANG_REF: (1,)}
NO_RULES = "vllm==0.30.0"
SOURCES = (*ASKED, NO_RULES)
SEED = config("qwen3.6-35b-a3b", quantization_config=QUANTS["auto-round-language"])
# The key of the published file; SGLang reads it though the layers are listed.
SEED["text_config"]["full_attention_interval"] = 4
GPUS = StatedGpus("8.6", 24 << 30, 2, "NVIDIA GeForce RTX 3090")
ENOUGH_S = 8 * HANG_S


class Unpacked:
    """Stands for a host that has these engines."""

    def __init__(self, python: Path, sources: dict[str, Path], folder: Path) -> None:
        self._python, self._sources, self._folder = python, sources, folder

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return engine

    async def identity(self, engine: EngineRef) -> str:
        return f"the sources of {engine}"

    def run_inquiry(
        self, engine: EngineRef, request: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        document = json.loads(request) | {"sources": str(self._sources[str(engine)])}
        return run_inquiry_process(self._python, self._folder, json.dumps(document).encode())


class ParsedAnswer(NamedTuple):
    """By engine, its answer for each size of tensor parallelism; and the answer of the version
    without rules about itself."""

    answers: dict[str, dict[int, EngineAnswer]]
    version: Any
    inquirer: Inquirer


def ref(engine: str) -> EngineRef:
    kind, _, version = engine.partition("==")
    return EngineRef(kind=kind, version=version, image=None)


def questions(engine: str, sizes: Sequence[int]) -> list[Question]:
    parallel, context = (
        ("tp-size", "context-length")
        if engine.startswith("sglang")
        else ("tensor-parallel-size", "max-model-len")
    )
    arguments = ("--dtype=bfloat16", f"--{context}=8192")
    return [
        Question(
            engine=engine, capability=GPUS.capability, argv=(f"--{parallel}={size}", *arguments)
        )
        for size in sizes
    ]


@pytest.fixture(scope="module")
def parsed_answers(engines: Path, tmp_path_factory: pytest.TempPathFactory) -> ParsedAnswer:
    """Everything is asked at once, two engines at a time: an import takes a core for 15 s."""
    folder, engine_cache = tmp_path_factory.mktemp("asked"), DownloadFolder(ROOT / ".cache/engines")
    with ThreadPoolExecutor(3) as pool:
        sources = dict(
            zip(
                SOURCES,
                pool.map(lambda name: engine_cache.sources(*name.split("==")), SOURCES),
                strict=True,
            )
        )
    python = engines / ENGINE.replace("==", "-") / "bin/python"
    host, cache = Unpacked(python, sources, folder / "asking"), AnswerCache(folder / "answers")
    model, turns = model_files(SEED, None), asyncio.Semaphore(2)

    async def ask_engines(engine: str) -> dict[int, EngineAnswer]:
        question_list = questions(engine, ASKED[engine])
        async with turns:
            answers = await Inquirer(host, cache).answers(
                ref(engine), GPUS, model, question_list, ENOUGH_S
            )
        return {
            size: answers[question]
            for size, question in zip(ASKED[engine], question_list, strict=True)
        }

    async def of_version() -> Any:
        async with turns:
            return await Inquirer(host, cache).version(ref(NO_RULES), GPUS, ENOUGH_S)

    async def all_of_it() -> tuple[Any, list[dict[int, EngineAnswer]]]:
        version, *answers = await asyncio.gather(of_version(), *map(ask_engines, ASKED))
        return version, answers

    version, answers = asyncio.run(all_of_it())
    return ParsedAnswer(dict(zip(ASKED, answers, strict=True)), version, Inquirer(host, cache))


def kernels(answer: EngineAnswer) -> set[str]:
    assert not answer.refusal_text
    return {row.kernel for row in answer.kernels}


def test_0_19_1_has_no_kernel_for_half_of_a_layer(parsed_answers: ParsedAnswer) -> None:
    halves = parsed_answers.answers["vllm==0.19.1"][2]
    whole = parsed_answers.answers["vllm==0.19.1"][1]
    assert (
        "Failed to find a kernel that can implement the WNA16 linear layer" in halves.refusal_text
    )
    assert (
        "MarlinLinearKernel cannot implement due to: Weight output_size_per_partition = 32"
        in halves.refusal_text
    )
    assert {"MarlinLinearKernel", "GPTQMarlinMoEMethod"} < kernels(whole)


@pytest.mark.parametrize("engine", ["vllm==0.26.0", VLLM_REF])
def test_later_versions_have_a_kernel_for_half_of_a_layer(
    parsed_answers: ParsedAnswer, engine: str
) -> None:
    assert {"MarlinLinearKernel", "MARLIN"} < kernels(parsed_answers.answers[engine][2])


def test_sglang_answers_for_one_gpu(parsed_answers: ParsedAnswer) -> None:
    """That its repacking refuses half of the layer is said in CUDA, which nobody is asked."""
    assert "apply_gptq_marlin_linear" in kernels(parsed_answers.answers[SGLANG_REF][1])


def test_a_version_that_no_rule_mentions_is_learned_and_plans_as_checked(
    parsed_answers: ParsedAnswer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forecast is a guess, and its own code then says that both GPUs together will do."""
    monkeypatch.setattr(offline, "REQUESTED_LIMIT_S", ENOUGH_S)  # a busy machine is not a reason
    near = Profiles().nearest(NO_RULES)
    profile: Engine = build_profile(near, ref(NO_RULES).version, None, *parsed_answers.version)
    assert near.ref != profile.ref
    store_profile(profile, tmp_path / "learned")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SEED))
    planner = OfflinePlanner.read_environment()
    planner.profiles = Profiles(data=tmp_path)
    request = wish(source=str(model), engines=(NO_RULES,), tensor_parallel=2)
    forecast = planner.decide(request, "2x3090")
    name, machine = planner.machine("2x3090")
    decision, answers_of_engine = asyncio.run(
        planner.check_on(request, name, machine, parsed_answers.inquirer)
    )
    assert answers_of_engine.problems == {}
    assert (forecast.plans[0].grade, decision.plans[0].grade) == ("guess", "checked")
    assert decision.plans[0].tensor_parallel.value == 2


@pytest.mark.parametrize("engine", [name for name in SOURCES if name.startswith("vllm==")])
def test_the_engine_has_the_endpoints_for_sleep(engine: str) -> None:
    """As tests/support/scripted_engine.py plays them; and the engine takes a layer of ours."""
    serving = (
        DownloadFolder(ROOT / ".cache/engines").sources(*engine.split("==")) / "vllm/entrypoints"
    )
    (router,) = serving.glob("serve/**/sleep/api_router.py")
    text = router.read_text()
    for route in (
        '@router.post("/sleep")',
        '@router.post("/wake_up")',
        '@router.get("/is_sleeping")',
    ):
        assert route in text
    assert '"level", "1"' in text or "level: Annotated[int, Query(ge=0, le=2)] = 1" in text
    assert 'content={"is_sleeping": is_sleeping}' in text
    assert any(
        "for middleware in args.middleware:" in path.read_text() for path in serving.rglob("*.py")
    )
