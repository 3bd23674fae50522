"""The contract of `gateway/hosts/host.py`, line by line, against every host."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from gateway.errors import Conflict, ForeignInstance, HostError
from gateway.hosts.host import MAX_LINE
from tests.support.patience import HANG_S, hang_s
from tests.support.scripted_engine import DEAF

from .harness import Harness, answering, find, get, request, until, wait_for_exit

pytestmark = pytest.mark.anyio


async def log_of(harness: Harness, name: str) -> list[bytes]:
    """The whole log of an engine that ends."""
    async with asyncio.timeout(hang_s()):
        return [line async for line in harness.host.follow(name)]


# --- start ---


async def test_start_of_an_absent_name_runs_the_engine(harness: Harness) -> None:
    spec = harness.make_spec("a1")
    instance = await harness.host.start(spec)
    assert (
        instance.name,
        instance.model,
        instance.attempt,
        instance.fingerprint,
        instance.state,
    ) == (spec.name, spec.model, spec.attempt, spec.fingerprint, "running")
    assert instance.exit_code is None
    await answering(instance)
    assert await harness.host.list() == [instance]


async def test_start_returns_when_the_process_exists_not_when_it_answers(harness: Harness) -> None:
    async with asyncio.timeout(hang_s()):
        instance = await harness.host.start(
            harness.make_spec("a1", script=["--start-delay", str(10 * HANG_S)])
        )
    assert instance.state == "running"
    assert harness.members("a1") > 0
    assert (await get(instance, "/health"))[0] == 0


async def test_start_of_a_running_instance_finds_it_and_starts_nothing(harness: Harness) -> None:
    spec = harness.make_spec("a1", script=["--print", "hello"])
    first_instance = await harness.host.start(spec)
    await answering(first_instance)
    second = await harness.host.start(spec)
    assert second == first_instance
    assert await harness.host.list() == [first_instance]
    assert harness.members("a1") == 1
    harness.kill_engine("a1")
    assert (await log_of(harness, "a1")).count(b"hello") == 1


async def test_two_concurrent_starts_run_one_engine(harness: Harness) -> None:
    spec = harness.make_spec("a1", script=["--print", "hello"])
    first, second = await asyncio.gather(harness.host.start(spec), harness.host.start(spec))
    assert first == second
    await answering(first)
    assert harness.members("a1") == 1


async def test_start_of_an_exited_instance_starts_it_again(harness: Harness) -> None:
    spec = harness.make_spec("a1")
    await answering(await harness.host.start(spec))
    harness.kill_engine("a1")
    await wait_for_exit(harness.host, "a1")
    instance = await harness.host.start(spec)
    assert (instance.state, instance.exit_code) == ("running", None)
    await answering(instance)
    assert await harness.host.list() == [instance]


async def test_another_start_ends_workers_that_outlived_the_engine(harness: Harness) -> None:
    spec = harness.make_spec("a1", script=["--spawn-child"])
    await answering(await harness.host.start(spec))
    assert harness.members("a1") == 2
    harness.kill_engine("a1")
    await wait_for_exit(harness.host, "a1")
    await answering(await harness.host.start(spec))
    assert harness.members("a1") == 2
    await harness.host.stop("a1", grace_s=0.2)
    assert harness.members("a1") == 0


async def test_start_over_a_running_instance_of_another_fingerprint_is_a_conflict(
    harness: Harness,
) -> None:
    first_instance = await harness.host.start(harness.make_spec("a1", fingerprint="f1"))
    with pytest.raises(Conflict):
        await harness.host.start(harness.make_spec("a1", fingerprint="f2"))
    await answering(first_instance)
    assert await harness.host.list() == [first_instance]


async def test_a_cancelled_start_leaves_nothing_or_an_instance_that_the_next_list_shows(
    harness: Harness,
) -> None:
    for number, delay_s in enumerate((0.0, 0.0005, 0.002, 0.005, 0.02)):
        spec = harness.make_spec(f"a{number}")
        start = asyncio.ensure_future(harness.host.start(spec))
        await asyncio.sleep(delay_s)
        start.cancel()
        await asyncio.wait({start})
        host = harness.restart()

        async def is_settled(name: str = spec.name) -> bool:
            return (await find(host, name) is not None) == (harness.members(name) > 0)  # noqa: B023

        await until(f"{spec.name} is listed exactly when it runs", is_settled)
        await answering(await host.start(spec))
        assert harness.members(spec.name) == 1


# --- list ---


async def test_list_shows_nothing_at_first(harness: Harness) -> None:
    assert await harness.host.list() == []


@pytest.mark.parametrize("code", [0, 3])
async def test_list_shows_an_exited_engine_with_its_exit_code(harness: Harness, code: int) -> None:
    await harness.host.start(harness.make_spec("a1", script=["--exit-code", str(code)]))
    instance = await wait_for_exit(harness.host, "a1")
    assert instance.exit_code == code
    assert await wait_for_exit(harness.host, "a1") == instance, "the exit code is not forgotten"


async def test_list_shows_a_killed_engine_as_exited_and_not_as_a_success(harness: Harness) -> None:
    await answering(await harness.host.start(harness.make_spec("a1")))
    harness.kill_engine("a1")
    assert (await wait_for_exit(harness.host, "a1")).exit_code not in (None, 0)


async def test_names_do_not_disturb_each_other(harness: Harness) -> None:
    names = ["a1", "a2", "a3"]
    instances = await asyncio.gather(
        *(harness.host.start(harness.make_spec(name)) for name in names)
    )
    await asyncio.gather(*(answering(instance) for instance in instances))
    assert sorted(instance.name for instance in await harness.host.list()) == names
    await asyncio.gather(
        harness.host.stop("a1", 5),
        harness.host.stop("a3", 5),
        harness.host.start(harness.make_spec("a4")),
    )
    assert sorted(instance.name for instance in await harness.host.list()) == ["a2", "a4"]


# --- stop ---


async def test_stop_of_an_absent_name_is_fine(harness: Harness) -> None:
    await harness.host.stop("a1", grace_s=1)
    assert await harness.host.list() == []


async def test_stop_ends_and_forgets_a_running_instance(harness: Harness) -> None:
    await answering(await harness.host.start(harness.make_spec("a1")))
    async with asyncio.timeout(hang_s()):  # an engine that obeys SIGTERM is not waited for
        await harness.host.stop("a1", grace_s=10 * HANG_S)
    assert await harness.host.list() == []
    assert harness.members("a1") == 0


async def test_stop_kills_an_engine_that_ignores_sigterm(harness: Harness) -> None:
    await answering(await harness.host.start(harness.make_spec("a1", script=["--ignore-term"])))
    await harness.host.stop("a1", grace_s=0.5)
    assert await harness.host.list() == []
    assert harness.members("a1") == 0


async def test_stop_leaves_an_engine_its_grace(harness: Harness) -> None:
    instance = await harness.host.start(harness.make_spec("a1", script=["--ignore-term"]))
    await answering(instance)
    stopping = asyncio.ensure_future(harness.host.stop("a1", grace_s=10 * HANG_S))
    async with aclosing(harness.host.follow("a1")) as lines, asyncio.timeout(hang_s()):
        while await anext(lines) != DEAF.encode():
            pass
    await answering(instance)
    assert not stopping.done()
    harness.kill_engine("a1")
    await asyncio.wait_for(stopping, hang_s())
    assert await harness.host.list() == []


async def test_stop_ends_workers_too(harness: Harness) -> None:
    await answering(await harness.host.start(harness.make_spec("a1", script=["--spawn-child"])))
    assert harness.members("a1") == 2
    await harness.host.stop("a1", grace_s=1)
    assert harness.members("a1") == 0


async def test_stop_ends_workers_that_outlived_the_engine(harness: Harness) -> None:
    await answering(await harness.host.start(harness.make_spec("a1", script=["--spawn-child"])))
    harness.kill_engine("a1")
    await wait_for_exit(harness.host, "a1")
    await harness.host.stop("a1", grace_s=0.2)
    assert await harness.host.list() == []
    assert harness.members("a1") == 0


async def test_stop_forgets_an_exited_instance(harness: Harness) -> None:
    await harness.host.start(harness.make_spec("a1", script=["--exit-code", "1"]))
    await wait_for_exit(harness.host, "a1")
    await harness.host.stop("a1", grace_s=60)
    assert await harness.host.list() == []


# --- foreign engines ---


async def test_a_name_held_by_somebody_else_is_never_touched(harness: Harness) -> None:
    foreign_name = harness.foreign("a1")
    assert foreign_name()
    assert await harness.host.list() == []
    with pytest.raises(ForeignInstance) as error:
        await harness.host.start(harness.make_spec("a1"))
    with pytest.raises(ForeignInstance) as refusal:
        await harness.host.stop("a1", grace_s=1)
    assert "a1" in error.value.message
    assert error.value.hint
    assert refusal.value.hint
    assert foreign_name()
    assert await harness.host.list() == []


# --- a gateway that comes back ---


async def test_a_new_gateway_adopts_running_engines(harness: Harness) -> None:
    spec = harness.make_spec("a1", script=["--print", "first words"])
    first_start = await harness.host.start(spec)
    await answering(first_start)
    host = harness.restart()
    assert await host.list() == [first_start]
    assert await host.start(spec) == first_start
    assert harness.members("a1") == 1
    await answering(first_start)
    async with aclosing(host.follow("a1")) as lines:
        assert await anext(lines) == b"first words"
    await host.stop("a1", grace_s=5)
    assert await host.list() == []
    assert harness.members("a1") == 0


async def test_engines_go_on_running_after_close(harness: Harness) -> None:
    instance = await harness.host.start(harness.make_spec("a1"))
    await answering(instance)
    await harness.host.close()
    await answering(instance)
    assert await harness.restart().list() == [instance]


async def test_an_engine_that_died_while_the_gateway_was_away_is_listed_as_exited(
    harness: Harness,
) -> None:
    await answering(await harness.host.start(harness.make_spec("a1")))
    host = harness.restart()
    harness.kill_engine("a1")
    assert (await wait_for_exit(host, "a1")).exit_code != 0


# --- follow ---


async def test_follow_gives_the_whole_log_and_ends_after_the_last_line(harness: Harness) -> None:
    script = [
        "--print",
        "\x1b[31mred\x1b[0m",
        "--print",
        "",
        "--print",
        "zwei drei ü",
        "--last-words",
        "no newline",
    ]
    await harness.host.start(
        harness.make_spec("a1", script=[*script, "--exit-code", "1", "--exit-after", "0.5"])
    )
    lines = await log_of(harness, "a1")
    assert lines[:3] == [b"\x1b[31mred\x1b[0m", b"", "zwei drei ü".encode()]
    assert lines[-1] == b"no newline"
    assert await log_of(harness, "a1") == lines, "from the first byte again, however late"


async def test_follow_gives_new_lines_as_they_come(harness: Harness) -> None:
    instance = await harness.host.start(harness.make_spec("a1"))
    await answering(instance)
    async with aclosing(harness.host.follow("a1")) as lines, asyncio.timeout(hang_s()):
        body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 2}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: engine\r\ncontent-length:"
            f" {len(body)}\r\nconnection: close\r\n\r\n"
        )
        assert (await request(instance, head.encode() + body))[0] == 200
        while b"POST /v1/completions" not in await anext(lines):
            pass
        harness.kill_engine("a1")
        assert [line async for line in lines] == []


async def test_follow_ends_when_the_instance_is_stopped(harness: Harness) -> None:
    await answering(await harness.host.start(harness.make_spec("a1", script=["--print", "hello"])))
    async with aclosing(harness.host.follow("a1")) as lines, asyncio.timeout(hang_s()):
        assert await anext(lines) == b"hello"
        await harness.host.stop("a1", grace_s=5)
        assert b"hello" not in [line async for line in lines]  # it ends, and begins nothing anew


async def test_follow_cuts_a_line_that_is_too_long(harness: Harness) -> None:
    script = [
        "--long-line",
        str(MAX_LINE),
        "--long-line",
        str(5 * MAX_LINE + 7),
        "--last-words",
        "end",
        "--exit-code",
        "1",
    ]
    await harness.host.start(harness.make_spec("a1", script=script))
    assert await log_of(harness, "a1") == [b"x" * MAX_LINE, b"x" * MAX_LINE, b"end"]


async def test_follow_loses_no_line_of_a_flood(harness: Harness) -> None:
    count = 50_000
    await harness.host.start(
        harness.make_spec("a1", script=["--flood", str(count), "--exit-code", "0"])
    )
    assert await log_of(harness, "a1") == [b"line %d" % number for number in range(count)]


async def test_the_log_stays_after_stop(harness: Harness) -> None:
    if not harness.log_stays:
        pytest.skip("the log of this host is a part of the instance")
    await answering(await harness.host.start(harness.make_spec("a1", script=["--print", "hello"])))
    await harness.host.stop("a1", grace_s=5)
    assert (await log_of(harness, "a1"))[0] == b"hello"


# --- prepare, allocate_port ---


async def test_prepare_of_an_engine_that_is_there_succeeds(harness: Harness) -> None:
    reports: list[str] = []
    await harness.host.prepare(harness.make_spec("a1").engine, reports.append)
    assert all(report.strip() for report in reports)


async def test_a_failed_prepare_names_the_next_step(harness: Harness) -> None:
    engine = harness.make_spec("a1").engine.evolve(
        version="0.0.0", image="fitserve-test-absent:0.0.0"
    )
    with pytest.raises(HostError) as error:
        await harness.host.prepare(engine, lambda report: None)
    assert "0.0.0" in error.value.message
    assert error.value.hint


async def test_an_allocated_port_can_be_used_for_the_next_engine(harness: Harness) -> None:
    port = await harness.host.allocate_port()
    instance = await harness.host.start(harness.make_spec("a1", port=port))
    await answering(instance)
    assert instance.url is not None
    assert instance.url.startswith("http://")


# --- processes ---


async def test_processes_are_those_of_the_whole_family_while_it_runs(harness: Harness) -> None:
    assert await harness.host.processes("a1") == ()
    instance = await harness.host.start(harness.make_spec("a1", script=["--spawn-child"]))
    await answering(instance)
    processes = await harness.host.processes("a1")
    assert len(processes) >= harness.members("a1") == 2
    assert len({process.pid for process in processes}) == len(processes)
    assert not any(each_process.is_stopped for each_process in processes)
    await harness.host.stop("a1", 0)
    assert await harness.host.processes("a1") == ()
