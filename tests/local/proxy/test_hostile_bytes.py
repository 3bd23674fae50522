"""Hostile bytes at the gateway's door: requests that parsers disagree on, each with its right
result, and mutations of them.

The engine behind logs raw bytes; see tests/hostile for the laws. `scripts/fuzz` sends as many
mutations as you like.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from anyio import to_thread

from tests.hostile.answers import Conversation, Script, answers
from tests.hostile.corpus import Seed, request
from tests.hostile.engine import LoggedEngine
from tests.hostile.forms import Form, forms
from tests.hostile.fuzz import (
    SENTINEL,
    Lane,
    Tally,
    every_request,
    fuzz,
    judge,
    lane_name,
    lanes_of,
    models_of,
    send,
)
from tests.hostile.strict import count_requests
from tests.support.patience import HANG_S, hang_s, wait_until
from tests.support.served import Served, serve_models

pytestmark = pytest.mark.anyio

INPUTS = 20_000
LANES = 16
GROWTH_MIB = 64


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def lanes() -> AsyncIterator[list[Lane]]:
    async with lanes_of(LANES) as new_lanes:
        yield new_lanes


@pytest.fixture(scope="module")
async def engines(lanes: list[Lane]) -> list[LoggedEngine]:
    return [lane.engine for lane in lanes]


@pytest.fixture(scope="module")
async def gateway(
    lanes: list[Lane], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    """Without keys, so that no change to a key hides later changes."""
    running = serve_models(tmp_path_factory.mktemp("served"), models_of(lanes))
    server = await to_thread.run_sync(running.__enter__)
    yield server
    await to_thread.run_sync(running.__exit__, None, None, None)


SEEDS = every_request(lane_name(0))


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.name)
async def test_each_request_of_the_corpus_asks_as_often_as_it_may(
    seed: Seed, gateway: Served, engines: list[LoggedEngine]
) -> None:
    reply, problems = await judge(gateway.port, seed.data + SENTINEL, engines[0], asks=seed.asks)
    assert not problems
    if seed.asks == 0:
        assert all(400 <= status < 500 for status, _ in reply.answers[:1]), reply


def test_the_strict_reader_reads_plain_requests_alone() -> None:
    counts_by_seed = {
        seed.name: (count_requests(seed.data), seed.asks) for seed in SEEDS if seed.asks
    }
    assert all(count >= asks for count, asks in counts_by_seed.values()), counts_by_seed
    counts = {seed.name: count_requests(seed.data) for seed in SEEDS}
    assert counts["two in a pipeline"] == counts["chunked, then one in a pipeline"] == 2
    for name in (
        "CL.TE",
        "TE.CL",
        "bare LF",
        "folded",
        "bare CR",
        "two CL",
        "chunk that lies",
        "NUL in a value",
        "HTTP/0.9",
    ):
        assert counts[name] == 0, name


SLOW = 150


async def test_heads_that_never_end_are_closed_and_others_are_served_meanwhile(
    gateway: Served, engines: list[LoggedEngine]
) -> None:
    """A third of the clients says nothing, a third stops within its head, a third sends a byte a
    second, and would for hours."""
    head = SEEDS[0].data.partition(b"\r\n\r\n")[0]
    sockets: list[int] = []

    async def wait_for_close(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        sockets.append(number)
        writer.write(head[: (0, number % len(head), 1)[number % 3]])
        task = asyncio.create_task(reader.read())
        async with asyncio.timeout(hang_s()):
            while not (await asyncio.wait((task,), timeout=1))[0]:
                if number % 3 == 2:
                    writer.write(b"a")
        task.exception()  # closed is closed, whether politely or not
        writer.transport.abort()

    slow = [asyncio.create_task(wait_for_close(number)) for number in range(SLOW)]
    await wait_until("all are open", lambda: len(sockets) == SLOW)
    served_meanwhile = 0
    while not all(task.done() for task in slow):
        reply, problems = await judge(
            gateway.port, SEEDS[0].data + SENTINEL, engines[0], quiet_s=HANG_S
        )
        assert (problems, reply.from_engine) == ([], 1)
        served_meanwhile += 1
        await asyncio.sleep(0.2)
    await asyncio.gather(*slow)
    assert served_meanwhile


ADMIN_TARGETS = (
    b"/admin/models",
    b"//admin/models",
    b"/v1/../admin/models",
    b"/v1/models/../../admin/models",
    b"/%61dmin/models",
    b"/admin%2fmodels",
    b"/healthz/../admin/models",
    b"/healthz?/admin/models",
    b"/admin;/models",
    b"/admin/models/",
    b"/ADMIN/models",
    b"http://127.0.0.1/admin/models",
    b"http://127.0.0.1/healthz/../admin/models",
    b"/v1/models#/../admin/models",
)
NOT_ADMIN = (b"/healthz?", b"/v1/models#")
"""The target of such a URL is open to the key that asks."""
HOSTS = (b"127.0.0.1", b"127.0.0.1/healthz?", b"127.0.0.1#", b"x/v1?a=", b"a@127.0.0.1")


@pytest.mark.parametrize("key", ["", "sk-inference-0123456789"], ids=["no key", "inference key"])
async def test_no_spelling_of_a_target_gains_a_scope(key: str, tmp_path: Path) -> None:
    settings = {
        "FITSERVE_ADMIN_KEY": "sk-admin-0123456789",
        "FITSERVE_API_KEY": "sk-inference-0123456789",
    }
    running = serve_models(tmp_path, {}, admin_key=settings["FITSERVE_ADMIN_KEY"], **settings)
    gateway = await to_thread.run_sync(running.__enter__)
    try:
        for target in ADMIN_TARGETS:
            for host in HOSTS:
                authorization = [b"authorization: Bearer " + key.encode()] if key else []
                data = request(
                    b"",
                    *authorization,
                    b"connection: close",
                    line=b"GET " + target + b" HTTP/1.1",
                    host=b"host: " + host,
                    length=None,
                )
                reply = await send(gateway.port, data, quiet_s=HANG_S)
                good = [status for status, _ in reply.answers if status < 400]
                assert not good or target.startswith(NOT_ADMIN), (target, host)
                assert reply.answers, target
    finally:
        await to_thread.run_sync(running.__exit__, None, None, None)


@pytest.mark.parametrize("form", forms(lane_name(0)), ids=lambda form: form.name)
async def test_each_form_names_the_model_that_starlette_reads(
    form: Form, gateway: Served, engines: list[LoggedEngine]
) -> None:
    _, problems = await judge(gateway.port, form.data + SENTINEL, engines[0], asks=form.asks)
    assert not problems


async def test_each_answer_of_a_hostile_engine_stays_with_its_request(
    gateway: Served, lanes: list[Lane]
) -> None:
    """Whole and in two pieces, closed and left open; each several times, for memories of the one
    before."""
    conversation = Conversation(gateway.port, lanes[0].evil, lanes[0].engine, 9_900_000)
    random_ = random.Random(1)
    scripts = [
        Script(data, cuts, closes)
        for data in answers()
        for cuts in ((), (), (len(data) // 2,))
        for closes in (True, False)
    ]
    problems = {
        script: wrong for script in scripts if (wrong := await conversation.run(random_, script))
    }
    conversation.close()
    assert not problems, [(script.data[:300], wrong) for script, wrong in problems.items()]


async def test_mutations_break_nothing(
    gateway: Served, lanes: list[Lane], engines: list[LoggedEngine]
) -> None:
    mib_before = gateway.resident_mib
    tally = Tally()
    await fuzz(gateway.port, lanes, INPUTS, seed=1, tally=tally)
    assert not tally.violations, tally.violations[:5]
    assert tally.inputs.total() == INPUTS
    assert min(tally.inputs.values()) > INPUTS / 10
    assert tally.answered["request"] > INPUTS / 50, (
        "too few mutations reach the engine to show anything"
    )
    assert tally.answered["form"] > INPUTS / 100, "the same of forms, most of which are refused"
    assert tally.statuses[400] > INPUTS / 50
    assert gateway.resident_mib - mib_before < GROWTH_MIB
    assert "Traceback" not in gateway.log
    _, problems = await judge(gateway.port, SEEDS[0].data + SENTINEL, engines[0])
    assert not problems
    assert len(engines[0].questions) == 1
