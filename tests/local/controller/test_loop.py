"""The whole main job over the in-memory twin: the acts of the loop with good engines, and with bad
ones."""

import asyncio
import functools
import math
import os
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.controller import loop as loop_module
from gateway.controller.fleet import managed_model
from gateway.controller.watch.verify import verify
from gateway.diagnosis.signatures import Signatures
from gateway.domain import Failure, Hardware, Instance, LaunchSpec, Plan
from gateway.errors import HostError
from gateway.planner.service import cure_versions
from gateway.profiles.profiles import Profiles
from gateway.store import database_files, mirror
from gateway.store.engine_logs import log_path
from tests.support.dataplane import until
from tests.support.memory_host import MemoryHost, World
from tests.support.patience import HANG_S, Clock, hang_s, wait_until
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

TOO_LONG = (
    "ValueError: To serve at least one request with the model's max seq len ({asked}), (4.00 GiB KV"
    " cache is needed, which is larger than the available KV cache memory (1.0 GiB). Based on the"
    " available memory, the estimated maximum model length is 1024."
)


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


def context_of(spec: LaunchSpec) -> int:
    return next(
        int(item.partition("=")[2]) for item in spec.argv if item.startswith("--max-model-len=")
    )


async def test_a_model_is_planned_started_verified_and_routed(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        view = await gateway.add("m", model_folder(tmp_path / "model"))
        assert view["state"] == "starting"
        ready = await gateway.until("m", "ready")
        assert ready["attempts"][0]["grade"] == "verified"
        assert ready["plan"]["max_model_len"]["value"] == 4096
        document = (await gateway.client.get("/v1/models")).json()
        assert [model["id"] for model in document["data"]] == ["m"]
        answer = await gateway.client.post(
            "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
        )
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"]


async def test_a_model_is_known_to_clients_as_soon_as_it_is_added(tmp_path: Path) -> None:
    look = asyncio.Event()
    look.set()

    class Slow(MemoryHost):
        async def list(self) -> list[Instance]:
            await look.wait()
            return await super().list()

    world = World()
    async with running(tmp_path, healthy, world, host=Slow(healthy, world)) as gateway:
        await gateway.add("first", model_folder(tmp_path / "model"))
        await gateway.until("first", "ready")
        look.clear()
        await gateway.add("second", tmp_path / "model")
        early = [
            await gateway.client.post("/v1/completions", json={"model": name, "prompt": "hi"})
            for name in ("second", "first")
        ]
        look.set()
        assert (early[0].status_code, early[0].json()["error"]["code"]) == (503, "model_not_ready")
        assert early[1].is_success
        await gateway.until("second", "ready")


async def test_clients_are_told_to_wait_for_a_model_that_is_not_ready(tmp_path: Path) -> None:
    def slow(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, start_delay_s=10 * HANG_S)

    async with running(tmp_path, slow) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        answer = await gateway.client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "model_not_ready"
        assert (
            await gateway.client.post("/v1/completions", json={"model": "x", "prompt": "hi"})
        ).status_code == 404


async def test_the_engines_own_maximum_is_learnt_and_used(tmp_path: Path) -> None:
    starts: list[int] = []

    def limited_script(spec: LaunchSpec) -> EngineScript:
        context = context_of(spec)
        starts.append(context)
        if context > 1024:
            # It prints its reason and lingers, as engines do: nobody waits for its end.
            return EngineScript(
                model=spec.model, lines=((0, TOO_LONG.format(asked=context)),), serve=False
            )
        return EngineScript(model=spec.model, max_model_len=context)

    source = model_folder(tmp_path / "model")
    async with running(tmp_path, limited_script) as gateway:
        await gateway.add("m", source)
        ready = await gateway.until("m", "ready")
        first, second = ready["attempts"]
        assert first["failure"]["kind"] == "kv_too_small"
        assert first["failure"]["culprit"]["engine_max_model_len"] == 1024
        assert "estimated maximum model length is 1024" in first["failure"]["line"]
        assert (second["state"], second["max_model_len"]) == ("ready", 1024)
        assert starts == [4096, 1024]
        # Learnt facts stay: the same model under another name goes straight to the plan that works.
        await gateway.add("again", source)
        assert len((await gateway.until("again", "ready"))["attempts"]) == 1
        assert starts == [4096, 1024, 1024]


async def _verify_within(
    patience_s: float, client: Any, url: str, name: str, plan: Plan, _: float, *more: Any
) -> Failure | None:
    return await verify(client, url, name, plan, patience_s, *more)


@pytest.mark.parametrize("fault", [{"gibberish": True}, {"empty": True}, {"hang_after": 0}])
async def test_an_engine_that_answers_nonsense_is_never_routed(
    tmp_path: Path, fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "hang_after" in fault:
        # Only the proof is impatient: a start that a busy machine slows down must not fail.
        impatient = functools.partial(_verify_within, 0.3)
        monkeypatch.setattr("gateway.controller.steps.proof_steps.verify", impatient)

    def nonsense(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, **fault)

    async with running(tmp_path, nonsense) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        view = await gateway.until("m", "no_plan")
        # The plan and one conservative try; the same plan never twice.
        assert len(view["attempts"]) == 2
        assert len({attempt["fingerprint"] for attempt in view["attempts"]}) == 2
        assert {attempt["failure"]["kind"] for attempt in view["attempts"]} <= {
            "gibberish",
            "verification_failed",
        }
        assert [
            model_row["state"]
            for model_row in (await gateway.client.get("/v1/models")).json()["data"]
        ] == ["no_plan"]


async def test_a_long_prompt_that_kills_the_engine_is_met_before_traffic(tmp_path: Path) -> None:
    def short(spec: LaunchSpec) -> EngineScript:
        # It says that it can do the planned context, and refuses it.
        return EngineScript(model=spec.model, max_model_len=100)

    async with running(tmp_path, short) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        view = await gateway.until("m", "no_plan")
        assert view["attempts"][0]["failure"]["kind"] == "verification_failed"


async def test_a_killed_engine_is_noticed_unrouted_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, healthy, backoff_s=3600, backoff_max_s=3600) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        (first,) = gateway.world.engines
        gateway.world.engines[first].kill()
        async with asyncio.timeout(hang_s()):
            while len((await gateway.until("m", "ready"))["attempts"]) == 1:
                await asyncio.sleep(0.02)
        # The first restart is immediate; the second one waits.
        (name,) = gateway.world.engines.keys() - {first}
        gateway.world.engines[name].kill()
        await gateway.until("m", "backing_off")
        assert [
            model_row["state"]
            for model_row in (await gateway.client.get("/v1/models")).json()["data"]
        ] == ["backing_off"]
        an_hour_later = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + 3601)
        monkeypatch.setattr("gateway.controller.steps.replica_steps.time", an_hour_later)
        ready = await gateway.until("m", "ready")
        assert [attempt["state"] for attempt in ready["attempts"]] == ["failed", "failed", "ready"]
        assert {attempt["failure"]["kind"] for attempt in ready["attempts"][:2]} == {"killed"}
        assert len({attempt["fingerprint"] for attempt in ready["attempts"]}) == 1


async def test_a_crash_loop_ends_in_quarantine_with_the_reason(tmp_path: Path) -> None:
    def killed_script(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, exit_code=-9, serve=False)

    async with running(tmp_path, killed_script) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), policy={"max_attempts": 3})
        view = await gateway.until("m", "quarantined")
        assert len(view["attempts"]) == 3
        assert "3 starts failed in a row" in view["detail"]
        assert not gateway.world.engines


async def test_a_restarted_gateway_adopts_running_engines(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        (before,) = world.engines.values()
    async with running(tmp_path, healthy, world) as gateway:
        ready = await gateway.until("m", "ready")
        assert len(ready["attempts"]) == 1
        assert list(world.engines.values()) == [before]
        answer = await gateway.client.post(
            "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
        )
        assert answer.status_code == 200


async def test_known_failures_are_read_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files take seconds, while requests to adopted engines go on."""
    readers: list[threading.Thread] = []

    def read(_machine: Hardware, profiles: Profiles) -> Signatures:
        readers.append(threading.current_thread())
        return profiles.signatures

    monkeypatch.setattr(cure_versions, "signatures_for", read)
    world = World()
    for has_begun in (True, False):
        async with running(tmp_path, healthy, world) as gateway:
            if has_begun:
                await gateway.add("m", model_folder(tmp_path / "model"))
            await gateway.until("m", "ready")
            await until(lambda: bool(readers))
        assert threading.current_thread() not in readers
        readers.clear()


async def test_an_engine_that_died_while_nobody_looked_is_replaced(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
    for engine in list(world.engines.values()):
        engine.kill()
    async with running(tmp_path, healthy, world) as gateway:
        ready = await gateway.until("m", "ready")
        assert len(world.engines) == 1
        assert [attempt["state"] for attempt in ready["attempts"]] == ["failed", "ready"]


async def test_an_engine_that_belongs_to_no_model_is_stopped(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path / "one", healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
    # Another data folder knows nothing of it, as when a database was set back.
    async with running(tmp_path / "two", healthy, world):
        async with asyncio.timeout(hang_s()):
            while world.engines:
                await asyncio.sleep(0.02)


async def test_removing_a_model_stops_its_engine_and_frees_the_name(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        source = model_folder(tmp_path / "model")
        await gateway.add("m", source)
        await gateway.until("m", "ready")
        assert (await gateway.client.delete("/admin/models/m")).status_code == 202
        await gateway.wait_until_gone("m")
        assert not gateway.world.engines
        await gateway.add("m", source)
        await gateway.until("m", "ready")


async def test_removing_a_model_that_is_just_starting_leaves_nothing(tmp_path: Path) -> None:
    def slow(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, start_delay_s=10 * HANG_S)

    async with running(tmp_path, slow) as gateway:
        for wait_s in (0, 0.05, 0.2):
            await gateway.add("m", model_folder(tmp_path / "model"))
            await asyncio.sleep(wait_s)
            await gateway.client.delete("/admin/models/m")
            await gateway.wait_until_gone("m")
            assert not gateway.world.engines


async def test_an_engine_that_never_served_gets_no_time_to_finish(tmp_path: Path) -> None:
    def deaf(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, start_delay_s=HANG_S, ignore_term=True)

    async with running(tmp_path, deaf, stop_grace_s=10 * HANG_S) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await until(lambda: bool(gateway.world.engines))
        await gateway.client.delete("/admin/models/m")
        await gateway.wait_until_gone("m")
        assert not gateway.world.engines


async def test_two_replicas_serve_and_one_failing_does_not_touch_the_other(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), replicas=2)
        await gateway.until("m", "ready")
        async with asyncio.timeout(hang_s()):
            while [replica["state"] for replica in (await gateway.show("m"))["replicas"]] != [
                "ready",
                "ready",
            ]:
                await asyncio.sleep(0.02)
        victim = next(engine for name, engine in gateway.world.engines.items() if "-r0-" in name)
        victim.kill()
        # Until then it takes requests, which are lost with it.
        await asyncio.wait({victim.task})
        for _ in range(20):
            answer = await gateway.client.post(
                "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
            )
            assert answer.status_code == 200


async def test_a_host_that_does_not_answer_is_reported_and_survived(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        async with asyncio.timeout(hang_s()):
            while (await gateway.client.get("/readyz")).status_code != 503:
                gateway.world.fail_next("list", HostError("Docker does not answer."))
                await asyncio.sleep(0.01)
        answer = await gateway.client.post(
            "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
        )
        assert answer.status_code == 200
        async with asyncio.timeout(hang_s()):
            while (await gateway.client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.02)
        assert len((await gateway.show("m"))["attempts"]) == 1


async def test_an_engine_that_cannot_be_started_backs_off_with_the_hosts_words(
    tmp_path: Path,
) -> None:
    world = World()
    world.fail_next("start", HostError("The image is broken.", hint="Build it again."))
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        ready = await gateway.until("m", "ready")
        failure = ready["attempts"][0]["failure"]
        assert (failure["kind"], failure["message"], failure["advice"]) == (
            "host_error",
            "The image is broken.",
            "Build it again.",
        )


async def test_an_endpoint_elsewhere_is_routed_while_it_answers_and_never_stopped(
    tmp_path: Path,
) -> None:
    async with running(tmp_path / "one", healthy) as endpoint_gateway:
        await endpoint_gateway.add("m", model_folder(tmp_path / "model"))
        await endpoint_gateway.until("m", "ready")
        async with running(tmp_path / "two", healthy) as gateway:
            response = await gateway.client.post(
                "/admin/models", json={"name": "alias", "endpoint": f"{endpoint_gateway.url}/v1"}
            )
            assert response.status_code == 202, response.text
            await gateway.until("alias", "ready")
            answer = await gateway.client.post(
                "/v1/completions", json={"model": "alias", "prompt": "hi", "max_tokens": 3}
            )
            assert answer.status_code == 200
            assert not gateway.world.engines
            await endpoint_gateway.client.delete("/admin/models/m")
            await gateway.until("alias", "unreachable")
            assert (
                await gateway.client.post(
                    "/v1/completions", json={"model": "alias", "prompt": "hi"}
                )
            ).status_code == 503
            await gateway.client.delete("/admin/models/alias")
            await gateway.wait_until_gone("alias")


async def test_a_batch_that_kills_the_engine_is_met_before_traffic(tmp_path: Path) -> None:
    def weak(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, crash_batch=16)

    async with running(tmp_path, weak, hang_after_s=60) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), args={"max-num-seqs": 32})
        view = await gateway.until("m", "no_plan")
        failure = view["attempts"][0]["failure"]
        assert failure["kind"] == "verification_failed"
        assert "Reduce the batch: --max-num-seqs below 32" in " ".join(failure["steps"])
    async with running(tmp_path / "again", weak) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), args={"max-num-seqs": 8})
        await gateway.until("m", "ready")


async def test_an_engine_that_hangs_behind_a_good_health_is_replaced(tmp_path: Path) -> None:
    lines: list[str] = []

    def hanging_script(spec: LaunchSpec) -> EngineScript:
        lines.append(spec.name)
        # Verification asks three times; the first one of a client is never answered.
        return EngineScript(model=spec.model, hang_after=3 if len(lines) == 1 else None)

    async with running(tmp_path, hanging_script, hang_after_s=0.6) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        answer = await gateway.client.post(
            "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
        )
        assert answer.status_code == 502
        view = await gateway.until("m", "ready")
        assert [attempt["state"] for attempt in view["attempts"]] == ["failed", "ready"]
        assert view["attempts"][0]["failure"]["kind"] == "hang"
        assert "no token" in view["attempts"][0]["failure"]["message"]


async def test_an_engine_that_is_long_silent_and_answers_beside_it_is_not_taken_for_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a long prompt. Five times as long as an engine may be silent, it answers the small
    request that asks whether it lives."""
    clock, hold = Clock(), tmp_path / "hold"
    monkeypatch.setattr("gateway.controller.watch.watcher.time", clock)
    monkeypatch.setattr("gateway.proxy.routing.routes.time", clock)

    def held_script(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, hold=hold)

    async with running(tmp_path, held_script, hang_after_s=60) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        (engine,) = gateway.world.engines.values()

        def count_questions() -> int:
            return sum(b'"POST ' in line for line in engine.log)

        hold.touch()
        question_count = count_questions()
        body = {"model": "m", "prompt": "hi", "max_tokens": 3}
        asking = asyncio.create_task(gateway.client.post("/v1/completions", json=body))
        await until(lambda: count_questions() == question_count + 1)
        for canaries in range(1, 6):
            clock.now += 61
            expected = question_count + 1 + canaries
            await until(lambda expected=expected: count_questions() == expected)  # type: ignore[misc]
            looks = clock.looks
            await until(lambda looks=looks: clock.looks > looks + 5)  # type: ignore[misc]
        hold.unlink()
        assert (await asking).status_code == 200
        assert [attempt["state"] for attempt in (await gateway.show("m"))["attempts"]] == ["ready"]


async def test_retry_lifts_quarantine_and_repeats_failed_plans_once(tmp_path: Path) -> None:
    is_broken = True

    def repaired_script(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, gibberish=is_broken)

    async with running(tmp_path, repaired_script) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), policy={"max_attempts": 1})
        view = await gateway.until("m", "quarantined")
        first = view["attempts"][0]["fingerprint"]
        is_broken = False
        assert (await gateway.client.post("/admin/models/nobody/retry")).status_code == 404
        assert (await gateway.client.post("/admin/models/m/retry")).status_code == 202
        view = await gateway.until("m", "ready")
        assert [(attempt["state"], attempt["fingerprint"]) for attempt in view["attempts"]] == [
            ("failed", first),
            ("ready", first),
        ]


@pytest.mark.parametrize("content", [b"", b"not a database " * 500])
async def test_a_damaged_database_stops_nothing_that_runs(tmp_path: Path, content: bytes) -> None:
    world = World()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
    engines = dict(world.engines)
    database = tmp_path / "data" / "fitserve.db"
    database_files.remove(database_files.mirror_of(database))
    database_files.remove(database)
    database.write_bytes(content)
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.until("m", "ready")
        assert world.engines == engines
        answer = await gateway.client.post(
            "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
        )
        assert answer.status_code == 200
        assert (await gateway.client.get("/readyz")).json()["problems"] == ["store"]
        response = await gateway.client.post(
            "/admin/models", json={"name": "n", "source": str(tmp_path / "model")}
        )
        assert response.status_code == 507
        assert "Nothing can be changed now" in response.json()["error"]["message"]
        assert (await gateway.client.delete("/admin/models/m")).status_code == 507
    assert list((tmp_path / "data").glob("fitserve.db.damaged-*"))
    # The next start begins with the running plan, and may be changed.
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.until("m", "ready")
        assert world.engines == engines
        assert (await gateway.client.get("/readyz")).status_code == 200
        assert (await gateway.client.delete("/admin/models/m")).status_code == 202
        await gateway.wait_until_gone("m")
    assert not list((tmp_path / "data" / "live").iterdir())


async def test_a_database_that_is_damaged_while_open_is_reported_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "_REST_S", math.inf)
    monkeypatch.setattr(loop_module, "_STORE_POLL_S", 0.1)
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        database = tmp_path / "data" / "fitserve.db"
        database.write_bytes(os.urandom(database.stat().st_size))

        async def is_noticed() -> bool:
            return (await gateway.client.get("/readyz")).status_code == 503

        # Until then a change may need no page of the damaged file.
        await wait_until("the damage is noticed", is_noticed)
        response = await gateway.client.post(
            "/admin/models", json={"name": "n", "source": str(tmp_path / "model")}
        )
        assert response.status_code == 507
        assert "was damaged while the gateway ran" in response.json()["error"]["message"]
        monkeypatch.setattr(mirror, "_REST_S", 0.0)
        async with asyncio.timeout(hang_s()):
            while (await gateway.client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.05)
        assert list((tmp_path / "data").glob("fitserve.db.damaged-*"))
        await gateway.until("m", "ready")
        await gateway.add("n", tmp_path / "model")
    async with running(tmp_path, healthy) as gateway:
        await gateway.until("m", "ready")
        await gateway.until("n", "ready")


async def test_the_logs_of_forgotten_attempts_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed_model, "MAX_ENDED_ATTEMPTS", 1)
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        logs = [log_path(tmp_path / "data", f"m-r0-a{number}") for number in (1, 2, 3)]
        for log in logs:
            await gateway.until("m", "ready")
            log.parent.mkdir(exist_ok=True)
            log.write_text("a line\n")
            await gateway.client.post("/admin/models/m/stop")
            await gateway.until("m", "stopped")
            await gateway.client.post("/admin/models/m/start")
        await gateway.until("m", "ready")
        assert [log.exists() for log in logs] == [False, False, True]


async def test_lines_that_come_after_the_proof_of_a_failure_are_in_the_log(tmp_path: Path) -> None:
    """The lines of other ranks may come late: over the network, or on a busy machine."""

    class Late(MemoryHost):
        async def follow(self, name: str) -> AsyncGenerator[bytes, None]:
            async with aclosing(super().follow(name)) as lines:
                yield await anext(lines)
                await wait_until("the engine has ended", lambda: name not in world.engines)
                async for line in lines:
                    yield line

    def fails(spec: LaunchSpec) -> EngineScript:
        cause = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
        words = ((0.0, cause), (0.0, "a line of the other rank"))
        return EngineScript(model=spec.model, lines=words, start_delay_s=HANG_S)

    world = World()
    host = Late(fails, world)
    log = log_path(tmp_path / "data", "m-r0-a1")
    async with running(tmp_path, fails, world, host=host, backoff_s=HANG_S) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await wait_until("the log is whole", lambda: log.exists() and "other" in log.read_text())
        # The next plan may have begun.
        first_attempt, *_ = (await gateway.show("m"))["attempts"]
        assert "an illegal memory access" in first_attempt["failure"]["line"]


async def test_a_model_that_is_kept_is_known_before_the_host_answers(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
    world = World()
    for _ in range(100_000):
        world.fail_next("list", HostError("Docker does not answer."))
    async with running(tmp_path, healthy, world) as gateway:
        assert (await gateway.show("m"))["state"] != "ready"
        answer = await gateway.client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
        assert answer.status_code == 503


async def test_requests_wait_for_the_first_pass_of_a_new_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, may_look = World(), asyncio.Event()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), aliases=["other"])
        await gateway.until("m", "ready")
    plain = MemoryHost.list

    async def held_script(host: MemoryHost) -> list[Instance]:
        await may_look.wait()
        return await plain(host)

    monkeypatch.setattr(MemoryHost, "list", held_script)
    async with running(tmp_path, healthy, world) as gateway:
        tasks = [
            asyncio.create_task(
                gateway.client.post(
                    "/v1/completions", json={"model": name, "prompt": "hi", "max_tokens": 3}
                )
            )
            for name in ("m", "other")
        ]
        response = await gateway.client.post("/v1/completions", json={"model": "x", "prompt": "hi"})
        assert response.status_code == 404
        assert not any(task.done() for task in tasks)
        may_look.set()
        assert [response.status_code for response in await asyncio.gather(*tasks)] == [200, 200]
