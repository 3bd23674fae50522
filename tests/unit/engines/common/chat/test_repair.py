"""Every repair of a published chat template: a passage as it is published fails, or hides an event;
the repaired one does neither."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.domain import ChatTemplate
from gateway.engines.common.chat.repair import repair_template
from gateway.profiles.profiles import Profiles
from tests.support.makers import machine, spec, wish
from tests.support.planning import decide
from tests.support.versions import VLLM_REF

PROFILES = Profiles()
REPAIRS = PROFILES.parsers.repairs
ID = "chatcmpl-tool-0123456789abc"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "of a city",
            "parameters": {"type": "object"},
        },
    }
]


def conversation_with_calls(*cities: str) -> list[dict[str, Any]]:
    """A conversation in which the model has called the tool, as engines give it to templates."""
    calls = [
        {"id": ID, "function": {"name": "get_weather", "arguments": {"city": city, "days": 3}}}
        for city in cities
    ]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": ID, "content": "SUNNY"},
    ]


def render(text: str, messages: list[dict[str, Any]]) -> str:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    environment.globals["raise_exception"] = refuse
    return environment.from_string(text).render(messages=messages, tools=TOOLS)


LLAMA = """{%- for message in messages %}{%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
{%- else %}{{ message.content }}{%- endif %}{%- endfor %}"""
NEMO = """{%- for message in messages %}{%- if message.tool_calls is defined %}
        {%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
        {%- endfor %}
    {%- else %}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- message.content + '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}{%- endfor %}"""  # noqa: E501
SMALL = """{%- for message in messages %}{%- if message.tool_calls is defined %}
        {%- for tool_call in message.tool_calls %}
                {%- if tool_call.id|length != 9 %}
                    {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
                {%- endif %}
                {{- '[CALL_ID]' + tool_call.id }}
                {{- '[ARGS]' + tool_call['function']['arguments']|tojson }}
        {%- endfor %}
    {%- else %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}{%- endfor %}"""  # noqa: E501
GRANITE = """{{- 'respond only with <|tool_call|> followed by a JSON list of tools used' }}{%- for message in messages %}
     {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>
' }}{%- endfor %}"""  # noqa: E501
LFM2 = """{{- "List of tools: " }}{%- for message in messages -%}
    {{- "<|im_start|>" + message["role"] + "\\n" -}}
    {%- set content = message["content"] -%}
    {{- content + "<|im_end|>\\n" -}}
{%- endfor -%}"""
SMOLLM = """{%- if xml_tools or python_tools -%}{%- for tool in xml_tools[:] -%}{{ tool | string }}{%- endfor -%}{%- endif -%}
{%- for message in messages -%}{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}{%- endfor -%}"""  # noqa: E501
CALL = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>'+ tool['function']['name'] +"
    " '<\uff5ctool\u2581sep\uff5c>"
)
DEEPSEEK = (
    "{%- set ns = namespace(system_prompt='') -%}{{ ns.system_prompt }}{%- for message in messages"
    " -%}{%- for tool in message.tool_calls or [] -%}{{'"
    + CALL
    + "' + tool['function']['arguments'] + '.'}}{%- endfor -%}{{ message.content }}{%- endfor -%}"
)
CASES: list[tuple[str, set[str], str, tuple[str, ...]]] = [
    (LLAMA, {"several-calls"}, "single tool-calls",
        ('"Paris", "days": 3}}; {"name": "get_weather"', "Lima")),
    (NEMO, {"long-call-ids"}, "length 9", ('"id": "456789abc"}', '"call_id": "456789abc"}', "Paris",
        "Lima")),
    (SMALL, {"long-call-ids-in-marks"}, "length 9",
        ("[CALL_ID]456789abc", "[TOOL_RESULTS]456789abc[TOOL_CONTENT]", "Lima")),
    (GRANITE, {"calls-in-history"}, "",
        ('<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"', "Lima")),
    (LFM2, {"calls-in-history-lfm2"}, "",
        ('<|tool_call_start|>[get_weather(city="Paris", days=3), get_weather(city="Lima"',
            "SUNNY")),
    (SMOLLM, {"tools-by-another-name"}, "", ("'name': 'get_weather', 'description'", "SUNNY")),
    (
        DEEPSEEK,
        {"arguments-as-objects", "tools-in-the-prompt"},
        "concatenate",
        ("### get_weather\nDescription: of a city", '{{additional_tool_calls}}',
            '{"city": "Paris", "days": 3}.', "Lima"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "names", "error", "parts"), CASES, ids=[next(iter(case[1])) for case in CASES]
)
def test_a_broken_template_is_mended(
    text: str, names: set[str], error: str, parts: tuple[str, ...]
) -> None:
    conversation = conversation_with_calls("Paris", "Lima")
    if error:
        with pytest.raises((TemplateError, TypeError), match=error):
            render(text, conversation)
    else:
        before = render(text, conversation)
        assert not all(part in before for part in parts)
    repaired_text, faults = repair_template(text, REPAIRS)
    assert {fault.name for fault in faults} == names
    after = render(repaired_text, conversation)
    assert [part for part in parts if part not in after] == []
    # Once is enough.
    assert repair_template(repaired_text, REPAIRS) == (repaired_text, ())


def test_every_repair_is_tried() -> None:
    assert {repair.name for repair in REPAIRS} == {
        name for _, names, _, _ in CASES for name in names
    }


def test_the_plan_names_repairs_and_the_users_template_wins() -> None:
    engine = PROFILES.engine(VLLM_REF)
    model = spec().evolve(chat_template=LLAMA)
    options = {"rules": PROFILES.rules([engine]), "parsers": PROFILES.parsers}
    plan = decide(model, machine("3090"), [engine], wish(), **options).plans[0]  # type: ignore[arg-type]
    repaired_text, _ = repair_template(LLAMA, REPAIRS)
    assert plan.chat_template.value == str(ChatTemplate(text=repaired_text, name="repaired"))
    assert "rejects a conversation with two tool calls" in plan.chat_template.reason
    assert "issues/25108" in plan.chat_template.source
    assert f"--chat-template={ChatTemplate(text=repaired_text).digest}.jinja" in plan.argv
    chat_template = ChatTemplate(text=LLAMA)
    request = wish(chat_template=chat_template)
    plan = decide(model, machine("3090"), [engine], request, **options).plans[0]  # type: ignore[arg-type]
    assert f"--chat-template={chat_template.digest}.jinja" in plan.argv
