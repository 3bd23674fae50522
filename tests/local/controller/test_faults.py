"""Faults around engines, and the clock: what the gateway does about each. Pure parts over a clock that is only a number."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.cli.present import show_model
from gateway.core.facts.learn import learn
from gateway.core.failures.diagnose import ended
from gateway.core.planner.decide import decide
from gateway.core.reconcile import MakePlan, ReplicaSnapshot, Rest, counted, next_action
from gateway.domain import Attempt, Failure, Hardware, Instance, LaunchSpec, Policy
from tests.support.makers import LLAMA_8B, attempt, engine, machine, spec, wish
from tests.support.memory_host import World
from tests.support.paths import LOGS
from tests.support.patience import HANG_S
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript

DAY = 86_400.0
START = 1_000_000.0


def failed(number: int, at: float, ready_at: float | None = None) -> Attempt:
    failure = Failure(kind="killed", phase="serving", message="The engine was killed (signal 9).", proves="nothing")
    return attempt(number, "failed", started_at=at, ended_at=at, ready_at=ready_at, failure=failure)


def act(history: list[Attempt], now: float, attempts: int = 50) -> object:
    replica = ReplicaSnapshot(wanted=True, policy=Policy(max_attempts=attempts), attempt=None, history=tuple(history))
    return next_action(replica, now, backoff_s=10, backoff_max_s=300)


def crashes(history: list[Attempt], now: float, until: float, step: float = 1.0) -> list[float]:
    """When starts are made that crash at once."""
    starts = []
    while now < until:
        if act(history, now) == MakePlan():
            starts.append(now)
            history.append(failed(len(history), now))
        now += step
    return starts


# --- a crash loop ---


@pytest.mark.unit
def test_a_crash_loop_starts_seven_times_in_a_quarter_of_an_hour() -> None:
    starts = crashes([], START, START + 900)
    assert len(starts) <= 8
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    for gap, expected in zip(gaps, (10, 20, 40, 80, 160, 300, 300), strict=False):
        assert expected <= gap <= 1.1 * expected


@pytest.mark.unit
def test_the_state_says_when_the_next_start_is() -> None:
    rest = act([failed(1, START), failed(2, START + 10)], START + 11)
    assert isinstance(rest, Rest)
    assert (rest.state, rest.until) == ("backing_off", START + 30)
    assert "The engine was killed" in rest.reason


@pytest.mark.unit
def test_ten_good_minutes_begin_the_back_off_anew() -> None:
    early = [failed(number, START) for number in range(6)]
    good = failed(6, START + 2000, ready_at=START + 1400)
    rest = act([*early, good], START + 2001)
    assert isinstance(rest, Rest)
    assert rest.until == START + 2010
    short = failed(6, START + 2000, ready_at=START + 1401)
    rest = act([*early, short], START + 2001)
    assert isinstance(rest, Rest)
    assert rest.until == START + 2300


# --- a clock that jumps ---


@pytest.mark.unit
@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_clock_that_jumps_costs_one_early_start_at_most(jump: float) -> None:
    history: list[Attempt] = []
    crashes(history, START, START + 100)
    before = len(history)
    starts = crashes(history, START + 100 + jump, START + 100 + jump + 900)
    # Without the jump the next gaps are 160 and 300.
    assert len(starts) <= 4
    assert len(history) == before + len(starts)


@pytest.mark.unit
@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_clock_that_jumps_touches_nothing_that_runs(jump: float) -> None:
    ready = attempt(1, "ready", ready_at=START)
    running_instance = Instance(name="m-r0-a1", model="m", attempt=1, fingerprint=ready.fingerprint, state="running")
    replica = ReplicaSnapshot(wanted=True, policy=Policy(), attempt=ready, instance=running_instance)
    assert next_action(replica, START + jump, backoff_s=10, backoff_max_s=300) == Rest("ready")


@pytest.mark.unit
def test_a_clock_set_back_does_not_forgive_what_fails_from_then_on() -> None:
    old, new = failed(1, START - 10), failed(2, START - DAY)
    assert counted([old, failed(2, START + 1)], START, START + 2) == (failed(2, START + 1),)
    assert new in counted([old, new], START, START - DAY + 1)


# --- memory ---


def next_plans(one: Attempt, failure: Failure, here: Hardware) -> tuple[str, ...]:
    facts = learn(one, failure, START)
    return tuple(plan.fingerprint for plan in decide(spec(), here, [engine("cuda")], wish(), facts).plans)


@pytest.mark.unit
def test_the_plan_whose_engine_the_kernel_killed_for_memory_is_never_made_again() -> None:
    one = attempt()
    killed = Instance(
        name="m", model="m", attempt=1, fingerprint=one.fingerprint, state="exited", exit_code=137, oom_killed=True
    )
    failure = ended(killed, "loading weights", (), was_ready=False)
    assert failure.kind == "host_oom"
    here = machine("2x3090")
    assert one.fingerprint in {plan.fingerprint for plan in decide(spec(), here, [engine("cuda")], wish(), ()).plans}
    plans = next_plans(one, failure, here)
    assert one.fingerprint not in plans


@pytest.mark.local
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("log", "gpus", "less"),
    [
        ("failed-oom-graphs-0.26.0", 1, ("--enforce-eager", "--max-num-seqs=32")),
        ("failed-oom-profile-0.33.0", 1, ("--enforce-eager", "--max-num-seqs=32")),
        ("failed-oom-load-0.19.1", 1, ("--quantization=fp8",)),
        ("failed-oom-load-0.19.1", 2, ("--pipeline-parallel-size=2",)),
    ],
)
async def test_an_engine_that_ran_out_of_gpu_memory_is_asked_for_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log: str, gpus: int, less: tuple[str, ...]
) -> None:
    """Where batch or graphs did not fit, by going without them; a GPU that cannot hold the weights shares them with another one,
    and only where there is none are they halved."""
    made: list[LaunchSpec] = []
    words = tuple((0.0, line) for line in (LOGS / f"{log}.log").read_text().splitlines())

    def large(launched: LaunchSpec) -> EngineScript:
        made.append(launched)
        if len(made) == 1:
            return EngineScript(model=launched.model, lines=words, exit_code=1, serve=False)
        return EngineScript(model=launched.model, max_model_len=200_000)

    both = machine("2x3090")
    async with running(tmp_path, large, hardware=both.evolve(gpus=both.gpus[:gpus])) as gateway:
        source = model_folder(tmp_path / "model", **LLAMA_8B)
        await gateway.add("m", source, engines=["vllm==0.26.0"], tensor_parallel=1)
        view = await gateway.until("m", "ready")
        first, second = view["attempts"]
        assert first["failure"]["kind"] == "gpu_oom"
        assert "out of memory" in first["failure"]["line"].lower()
        assert first["fingerprint"] != second["fingerprint"]
        assert not set(less) & set(made[0].argv)
        assert set(less) <= set(made[1].argv)
        halved = "--quantization=fp8" in less
        assert ("--quantization=fp8" in made[1].argv) is halved
        assert ("quantized to fp8 while they load" in " ".join(view["plan"]["warnings"])) is halved
        capsys.readouterr()
        show_model(view)
        shown = " ".join(capsys.readouterr().out.split())
        assert shown.endswith("weights in fp8") is halved
        assert ("weights are halved while they load: 24.45 GiB were needed here beside the KV cache" in shown) is halved
        learned = [one["fact"] for one in (await gateway.client.get("/admin/facts")).json()["data"] if one["id"]]
        assert learned[0]["kind"] in ("spare_memory", "needs_memory")
        assert "out of memory" in learned[0]["source"]


@pytest.mark.local
@pytest.mark.anyio
async def test_gpus_that_cannot_talk_to_each_other_get_another_way_to_and_at_last_share_nothing(tmp_path: Path) -> None:
    made: list[LaunchSpec] = []
    words = tuple((0.0, line) for line in (LOGS / "failed-nccl-0.19.1.log").read_text().splitlines())

    def apart(launched: LaunchSpec) -> EngineScript:
        made.append(launched)
        alone = "--tensor-parallel-size=1" in launched.argv
        return EngineScript(model=launched.model, lines=() if alone else words, serve=alone, exit_code=None if alone else 1)

    async with running(tmp_path, apart, hardware=machine("2x3090")) as gateway:
        source = model_folder(tmp_path / "model", **LLAMA_8B)
        # So much context needs two GPUs, or a cache and weights of half the bytes.
        await gateway.add("m", source, engines=["vllm==0.26.0"], min_context=100_000)
        view = await gateway.until("m", "ready")
        assert [one["failure"]["kind"] for one in view["attempts"][:-1]] == ["nccl", "nccl"]
        assert len({one["fingerprint"] for one in view["attempts"]}) == 3
        assert [launched.env.get("NCCL_P2P_DISABLE") for launched in made] == [None, "1", None]
        assert [len(launched.gpus) for launched in made] == [2, 2, 1]
        assert view["attempts"][1]["otherwise"] == "no peer-to-peer access"


# --- engines that are not what was recorded, and names that others have ---


def healthy(launched: LaunchSpec) -> EngineScript:
    return EngineScript(model=launched.model)


@pytest.mark.local
@pytest.mark.anyio
async def test_an_adopted_engine_with_another_plan_gets_no_request_and_is_replaced_once(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
    ((name, other),) = world.engines.items()
    other.spec = other.spec.evolve(fingerprint="made-by-somebody")
    asked = len(other.log)
    async with running(tmp_path, healthy, world) as gateway:
        answers = set()
        async with asyncio.timeout(HANG_S):
            while name in world.engines:
                body = {"model": "m", "prompt": "hi", "max_tokens": 3}
                answers.add((await gateway.client.post("/v1/completions", json=body)).status_code)
        assert answers <= {503}
        assert not [line for line in other.log[asked:] if b"POST" in line]
        await gateway.until("m", "ready")
        ((renewed, engine_now),) = world.engines.items()
        assert engine_now is not other
        assert engine_now.spec.fingerprint != "made-by-somebody"
        # The loop has looked at it many times when another one is ready.
        await gateway.add("other", model_folder(tmp_path / "model"))
        await gateway.until("other", "ready")
        assert [name for name, one in world.engines.items() if one.spec.name.startswith("m-")] == [renewed]


@pytest.mark.local
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
        await gateway.gone("m")
    assert world.foreign == {"m-r0-a1"}
