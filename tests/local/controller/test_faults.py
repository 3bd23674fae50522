"""Faults around engines, and the clock: the acts of the gateway on each. Pure parts over a clock
that is only a number."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.cli.model_output import next_attempt_text, show_model
from gateway.domain import LaunchSpec
from gateway.errors import StoreError
from gateway.store.store import Store
from tests.support.makers import LLAMA_8B, machine
from tests.support.memory_host import World
from tests.support.paths import LOGS
from tests.support.patience import hang_s, wait_until
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript

# --- a crash loop ---


# --- a clock that jumps ---


# --- memory ---


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("log", "gpus", "less"),
    [
        ("failed-oom-graphs-0.26.0", 1, ("--gpu-memory-utilization=0.86",)),
        ("failed-oom-profile-0.33.0", 1, ("--enforce-eager", "--max-num-seqs=32")),
        ("failed-oom-load-0.19.1", 1, ("--quantization=fp8",)),
        ("failed-oom-load-0.19.1", 2, ("--pipeline-parallel-size=2",)),
    ],
)
async def test_an_engine_that_ran_out_of_gpu_memory_is_asked_for_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log: str, gpus: int, less: tuple[str, ...]
) -> None:
    """Where graphs did not fit besides the KV cache, by more room for them; where a batch did not,
    by a smaller one; a GPU that cannot hold the weights shares them with another one,
    and only where there is none are they halved."""
    specs: list[LaunchSpec] = []
    words = tuple((0.0, line) for line in (LOGS / f"{log}.log").read_text().splitlines())

    def large(launched: LaunchSpec) -> EngineScript:
        specs.append(launched)
        if len(specs) == 1:
            return EngineScript(model=launched.model, lines=words, exit_code=1, serve=False)
        return EngineScript(model=launched.model, max_model_len=200_000)

    pair_machine = machine("2x3090")
    async with running(
        tmp_path, large, hardware=pair_machine.evolve(gpus=pair_machine.gpus[:gpus])
    ) as gateway:
        source = model_folder(tmp_path / "model", **LLAMA_8B)
        await gateway.add("m", source, engines=["vllm==0.26.0"], tensor_parallel=1, replicas=1)
        view = await gateway.until("m", "ready")
        first, second = view["attempts"]
        assert first["failure"]["kind"] == "gpu_oom"
        assert "out of memory" in first["failure"]["line"].lower()
        assert first["fingerprint"] != second["fingerprint"]
        assert not set(less) & set(specs[0].argv)
        assert set(less) <= set(specs[1].argv)
        has_fp8 = "--quantization=fp8" in less
        assert ("--quantization=fp8" in specs[1].argv) is has_fp8
        assert ("quantized to fp8 while they load" in " ".join(view["plan"]["warnings"])) is has_fp8
        capsys.readouterr()
        show_model(view, {})
        output = " ".join(capsys.readouterr().out.split())
        assert output.endswith("weights in fp8") is has_fp8
        # The next plan is shown next to the failure, by its differences.
        follows = view["attempts"][0]["follows"]
        assert (follows["attempt"], view["attempts"][1]["follows"]) == (
            view["attempts"][1]["id"],
            None,
        )
        assert f"next: {' '.join(next_attempt_text(follows).split())}" in output
        assert ("quantization" in {differ["field"] for differ in follows["differs"]}) is has_fp8
        assert (
            "weights are halved while they load: 24.45 GiB were needed here besides the KV cache"
            in output
        ) is has_fp8
        facts = [
            row["fact"]
            for row in (await gateway.client.get("/admin/facts")).json()["data"]
            if row["id"]
        ]
        assert facts[0]["kind"] in ("spare_memory", "needs_memory")
        assert "out of memory" in facts[0]["source"]


@pytest.mark.anyio
async def test_gpus_that_cannot_communicate_get_other_ways_and_last_single_plans(
    tmp_path: Path,
) -> None:
    specs: list[LaunchSpec] = []
    words = tuple(
        (0.0, line) for line in (LOGS / "failed-nccl-0.19.1.log").read_text().splitlines()
    )

    def script_of_start(launched: LaunchSpec) -> EngineScript:
        specs.append(launched)
        is_single = "--tensor-parallel-size=1" in launched.argv
        return EngineScript(
            model=launched.model,
            lines=() if is_single else words,
            serve=is_single,
            exit_code=None if is_single else 1,
        )

    async with running(tmp_path, script_of_start, hardware=machine("2x3090")) as gateway:
        source = model_folder(tmp_path / "model", **LLAMA_8B)
        # So much context needs two GPUs, or a cache and weights of half the bytes.
        await gateway.add("m", source, engines=["vllm==0.26.0"], min_context=100_000, replicas=1)
        view = await gateway.until("m", "ready")
        assert [attempt["failure"]["kind"] for attempt in view["attempts"][:-1]] == ["nccl", "nccl"]
        assert len({attempt["fingerprint"] for attempt in view["attempts"]}) == 3
        assert [spec.env.get("NCCL_P2P_DISABLE") for spec in specs] == [None, "1", None]
        assert [len(spec.gpus) for spec in specs] == [2, 2, 1]
        assert view["attempts"][1]["default_differences"] == "no peer-to-peer access"


# --- engines unlike their records, and names that others have ---


def healthy(launched: LaunchSpec) -> EngineScript:
    return EngineScript(model=launched.model)


@pytest.mark.anyio
async def test_an_adopted_engine_with_another_plan_gets_no_request_and_is_replaced_once(
    tmp_path: Path,
) -> None:
    world = World()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
    ((name, other_engine),) = world.engines.items()
    other_engine.spec = other_engine.spec.evolve(fingerprint="made-by-somebody")
    count = len(other_engine.log)
    async with running(tmp_path, healthy, world) as gateway:
        answers = set()
        async with asyncio.timeout(hang_s()):
            while name in world.engines:
                body = {"model": "m", "prompt": "hi", "max_tokens": 3}
                answers.add((await gateway.client.post("/v1/completions", json=body)).status_code)
        assert answers <= {503}
        assert not [line for line in other_engine.log[count:] if b"POST" in line]
        await gateway.until("m", "ready")
        ((instance_name, engine_now),) = world.engines.items()
        assert engine_now is not other_engine
        assert engine_now.spec.fingerprint != "made-by-somebody"
        # The loop has looked at it many times when another one is ready.
        await gateway.add("other", model_folder(tmp_path / "model"))
        await gateway.until("other", "ready")
        assert [
            name for name, engine in world.engines.items() if engine.spec.name.startswith("m-")
        ] == [instance_name]


@pytest.mark.anyio
async def test_a_name_that_a_stranger_has_is_left_to_him(tmp_path: Path) -> None:
    world = World()
    world.foreign.add("m-r0-a1")
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        view = await gateway.until("m", "ready")
        assert "Somebody else holds the name m-r0-a1" in view["attempts"][0]["failure"]["message"]
        assert list(world.engines) == ["m-r0-a2"]
        assert world.foreign == {"m-r0-a1"}
        await gateway.client.delete("/admin/models/m")
        await gateway.wait_until_gone("m")
    assert world.foreign == {"m-r0-a1"}


# --- a record that is refused ---


@pytest.mark.anyio
async def test_the_state_names_an_end_that_the_store_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("the disk is full", hint="Free some space.")

    async with running(tmp_path, lambda spec: EngineScript(model=spec.model)) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        with monkeypatch.context() as full:
            full.setattr(Store, "save_attempt", refuse)
            for engine in gateway.world.engines.values():
                engine.kill()

            async def is_named() -> bool:
                # The end of the log is read first.
                view = await gateway.show("m")
                return view["state"] == "starting" and "its engine failed" in view["detail"]

            await wait_until("the state names the failure", is_named)
        await gateway.until("m", "ready")
