"""The abilities of a model for apps, by the official SDK through the gateway, with the real engine:
the demo model that thinks and calls a tool by itself, and is held to a call or a schema by the
engine's grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.demo.checkpoint import make_model
from gateway.cli.demo.tokenizer import CHAT_TEMPLATE, THOUGHT
from tests.e2e.conftest import START_S, Gateway, with_abilities
from tests.support.sdk_calls import openai_client

pytestmark = pytest.mark.engine

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["celsius"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    **TOOL["function"]["parameters"],
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"type": "boolean"}},
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
}
ASKED: Any = [{"role": "user", "content": "What weather has Rome?"}]


@pytest.fixture(scope="module")
def ready(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    folder = tmp_path_factory.mktemp("models") / "thinking"
    make_model(folder, thinks=True)
    response = gateway.client.post(
        "/admin/models", json={"name": "thinking", "source": str(folder), "engines": ["vllm-cpu"]}
    )
    assert response.status_code == 202, response.text
    gateway.until("thinking", "ready", START_S)
    return gateway


def test_the_model_reports_its_abilities(ready: Gateway) -> None:
    abilities = {
        name: f"{ability['state']}: {ability['evidence']}"
        for name, ability in with_abilities(ready, "thinking")["abilities"].items()
    }
    assert abilities == {
        "tools": "proven: it called get_weather with arguments that fit",
        "required_tools": "proven: it called get_weather with arguments that fit",
        "reasoning": f"proven: {len(THOUGHT)} characters of thoughts came apart from the answer",
        "json_schema": "proven: its answer fits the schema",
    }
    document = ready.client.get("/v1/models/thinking").json()
    assert {document[name] for name in abilities} == {"proven"}


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_tool_is_called(ready: Gateway, choice: Any) -> None:
    with openai_client(ready.url) as client:
        answer = client.chat.completions.create(
            model="thinking",
            messages=ASKED,
            tools=[TOOL],
            tool_choice=choice,
            max_tokens=300,
            temperature=0,
        )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert (arguments["unit"], set(arguments)) == ("celsius", {"city", "unit"})


def test_an_answer_fits_its_schema(ready: Gateway) -> None:
    with openai_client(ready.url) as client:
        answer = client.chat.completions.create(
            model="thinking", messages=ASKED, response_format=FORMAT, max_tokens=300, temperature=0
        )
    document = json.loads(answer.choices[0].message.content or "")
    assert document["city"] in ("Paris", "Rome")
    assert isinstance(document["unit"], bool)


def test_thoughts_come_apart_whole_and_streamed(ready: Gateway) -> None:
    with openai_client(ready.url) as client:
        answer = client.chat.completions.create(
            model="thinking", messages=ASKED, max_tokens=300, temperature=0
        )
        message: Any = answer.choices[0].message
        assert message.reasoning == THOUGHT
        assert message.content.startswith("<tool_call>")
        stream = client.chat.completions.create(
            model="thinking", messages=ASKED, max_tokens=300, temperature=0, stream=True
        )
        deltas: list[Any] = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_a_users_chat_template_makes_the_prompts_and_chooses_the_parsers(
    ready: Gateway, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ 'MARKED ' }}" + CHAT_TEMPLATE)  # without a switch for thoughts
    result = ready.cli("set", "thinking", "--chat-template", str(file), "--wait")
    assert result.returncode == 0, result.stderr
    file.unlink()
    abilities = with_abilities(ready, "thinking")
    assert abilities["plan"]["chat_template"]["value"].startswith("mine.jinja (")
    reasoning = abilities["abilities"]["reasoning"]
    assert (reasoning["state"], abilities["abilities"]["tools"]["state"]) == (
        "not proven",
        "proven",
    ), abilities["abilities"]
    assert "no form of thoughts" in reasoning["evidence"]
    tokens = ready.client.post("/tokenize", json={"model": "thinking", "messages": ASKED}).json()[
        "tokens"
    ]
    prompt = ready.client.post("/detokenize", json={"model": "thinking", "tokens": tokens}).json()[
        "prompt"
    ]
    assert "MARKED" in prompt
