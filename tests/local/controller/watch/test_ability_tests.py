"""A model's abilities for apps are shown by its engine at its first start, kept with the attempt,
and told everywhere; a model that does not do it serves all the same. Real sockets; the engines are
scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from gateway.cli.model_output import show_model
from gateway.controller.watch.ability_tests import probe_abilities
from tests.support.able_engines import ALL, add_model, doing
from tests.support.makers import machine
from tests.support.memory_host import World
from tests.support.patience import HANG_S, hang_s
from tests.support.running import running
from tests.support.sdk_calls import TOOL

pytestmark = pytest.mark.anyio

PLAIN = "{{ messages }}"
TOOLS: Any = [{"type": "function", "function": TOOL}]
ASKED: Any = [{"role": "user", "content": "What weather has Paris?"}]


@pytest.fixture(autouse=True)
def awaited_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is ready with its answers: a busy machine takes longer than a gateway waits."""
    monkeypatch.setattr("gateway.controller.steps.proof_steps._ABILITIES_S", HANG_S)


def states(view: Any) -> dict[str, str]:
    return {name: ability["state"] for name, ability in view["abilities"].items()}


async def test_every_listing_shows_the_proven_abilities_of_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, doing(ALL), hardware=machine("3090")) as gateway:
        view = await add_model(gateway, tmp_path / "m")
        assert states(view) == dict.fromkeys(ALL, "proven")
        [model_row] = (await gateway.client.get("/admin/models")).json()["data"]
        assert states(model_row) == states(view)
        model = (await gateway.client.get("/v1/models")).json()["data"][0]
        assert {name: model[name] for name in ALL} == dict.fromkeys(ALL, "proven")
        assert (model["state"], model["max_model_len"]) == (
            "ready",
            view["plan"]["max_model_len"]["value"],
        )
        show_model(view, {})
        assert (
            "tool calls           proven  it called get_weather with arguments that fit"
            in capsys.readouterr().out
        )


async def test_a_model_without_abilities_for_apps_serves_and_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, doing(frozenset()), hardware=machine("3090")) as gateway:
        view = await add_model(gateway, tmp_path / "m")
        assert len(view["attempts"]) == 1
        assert view["abilities"]["tools"]["evidence"].startswith(
            "it called no tool, and said: ' an engine"
        )
        client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        # It may call a tool another time: its engine has a parser, so it is asked.
        answer = await client.chat.completions.create(model="m", messages=ASKED, tools=TOOLS)
        assert answer.choices[0].message.content
        assert not answer.choices[0].message.tool_calls
        await client.close()


async def test_tools_for_a_model_without_a_parser_are_refused_by_the_gateway(
    tmp_path: Path,
) -> None:
    record = tmp_path / "record"
    async with running(
        tmp_path, doing(frozenset({"json_schema"}), record), hardware=machine("3090")
    ) as gateway:
        view = await add_model(gateway, tmp_path / "m", PLAIN)
        assert states(view) == {**dict.fromkeys(ALL, "not proven"), "json_schema": "proven"}
        request_count = record.read_bytes().count(b"POST")
        client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        choices: tuple[Any, ...] = ({}, {"tool_choice": "auto"}, {"tool_choice": "required"})
        for choice in choices:
            with pytest.raises(BadRequestError) as error:
                await client.chat.completions.create(
                    model="m", messages=ASKED, tools=TOOLS, **choice
                )
            assert (error.value.param, error.value.code) == ("tools", "bad_request")
            assert (
                "'m' cannot call tools here: the chat template has no form of tool calls that is"
                " known" in str(error.value)
            )
        messages = {
            "model": "m",
            "max_tokens": 9,
            "messages": ASKED,
            "tools": [{"name": "f", "input_schema": {}}],
        }
        refusal = await gateway.client.post("/v1/messages", json=messages)
        assert (refusal.status_code, refusal.json()["error"]["type"]) == (
            400,
            "invalid_request_error",
        )
        assert record.read_bytes().count(b"POST") == request_count, "no engine heard of them"
        without: tuple[dict[str, Any], ...] = (
            {"tools": []},
            {"tools": None},
            {"tools": TOOLS, "tool_choice": "none"},
            {},
        )
        for fields in without:
            body = {"model": "m", "messages": ASKED, **fields}
            assert (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 200
        await client.close()


async def test_a_plan_that_was_asked_once_is_not_asked_at_its_next_start(tmp_path: Path) -> None:
    world, record = World(), tmp_path / "record"
    async with running(tmp_path, doing(ALL, record), world, machine("3090")) as gateway:
        await add_model(gateway, tmp_path / "m")
        assert record.read_bytes().count(b"get_weather") == 2
        for engine in world.engines.values():
            engine.kill()
        async with asyncio.timeout(hang_s()):
            while len((view := await gateway.until("m", "ready"))["attempts"]) < 2:
                await asyncio.sleep(0.02)
        assert states(view) == dict.fromkeys(ALL, "proven")
        assert record.read_bytes().count(b"get_weather") == 2
    async with running(tmp_path, doing(ALL, record), world, machine("3090")) as gateway:
        assert states(await gateway.until("m", "ready")) == dict.fromkeys(ALL, "proven")


async def test_an_engine_serves_during_long_tests_of_abilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.controller.steps.proof_steps._ABILITIES_S", 0.0)
    event: asyncio.Event = asyncio.Event()

    async def slow(*engine: Any) -> Any:
        await event.wait()
        return await probe_abilities(*engine)

    monkeypatch.setattr("gateway.controller.steps.proof_steps.probe_abilities", slow)
    world = World()
    async with running(tmp_path, doing(ALL), world, machine("3090")) as gateway:
        view = await add_model(gateway, tmp_path / "m")
        assert states(view)["json_schema"] == "unknown"
        event.set()
        async with asyncio.timeout(hang_s()):
            while states(view) != dict.fromkeys(ALL, "proven"):
                await asyncio.sleep(0.02)
                view = await gateway.until("m", "ready")
        assert len(view["attempts"]) == 1
    async with running(tmp_path, doing(ALL), world, machine("3090")) as gateway:
        assert states(await gateway.until("m", "ready")) == dict.fromkeys(ALL, "proven")


async def test_an_engine_that_dies_of_the_question_serves_without_it(tmp_path: Path) -> None:
    async with running(tmp_path, doing(ALL, crash_tools=True), hardware=machine("3090")) as gateway:
        view = await add_model(gateway, tmp_path / "m")
        first, second = view["attempts"]
        assert (first["state"], second["state"]) == ("failed", "ready")
        assert first["fingerprint"] == second["fingerprint"], "the plan has not failed"
        assert states(view) == dict.fromkeys(ALL, "not proven")
        assert (
            view["abilities"]["tools"]["evidence"]
            == f"attempt {first['id']} ended when it was asked"
        )
