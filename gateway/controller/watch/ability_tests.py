"""Tests of features that apps rely on: tool calls, thoughts, schemas."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.controller.watch.engine_answers import ChatCompletion
from gateway.controller.watch.engine_client import (
    EngineClient,
    NoAnswerError,
)
from gateway.domain import Abilities, Ability, Plan
from gateway.engines.common.chat import abilities
from gateway.engines.common.chat.abilities import ParsedAnswer


async def probe_abilities(client: EngineClient, url: str, name: str, plan: Plan) -> Abilities:
    """Test the abilities that apps rely on."""
    questions = abilities.questions(plan)
    answers = await asyncio.gather(
        *(
            _tested_ability(client, url, {**body, "model": name}, ability)
            for ability, body in questions.items()
        )
    )
    return abilities.abilities_by_plan(plan).evolve(**dict(zip(questions, answers, strict=True)))


async def _tested_ability(
    client: EngineClient, url: str, body: dict[str, Any], ability: str
) -> Ability:
    """The ability by the answer of an engine to one request."""
    try:
        answer = await client.post(
            f"{url}/v1/chat/completions", body, abilities.ABILITIES_TIMEOUT_S
        )
        if answer.status != 200:
            return Ability(
                state="not proven",
                evidence=f"the engine answered {answer.status}: {answer.excerpt}",
            )
        choices = (await answer.read(ChatCompletion)).choices
    except NoAnswerError as error:
        return Ability(evidence=f"the engine {error}")
    if not choices:
        return Ability(state="not proven", evidence="its answer has no choices")
    message = choices[0].message
    calls = tuple(
        (call.function.name or "", call.function.arguments or "")
        for call in message.tool_calls or ()
    )
    thoughts = message.reasoning or message.reasoning_content or ""
    return abilities.judge(
        ability,
        ParsedAnswer(message.content or "", thoughts, calls, choices[0].finish_reason != "length"),
    )
