"""How published models write tool calls and thoughts: python -m tests.conformance.dialects FOLDER >
tests/conformance/dialects.json

FOLDER has chat templates (`models/templates` of llama.cpp, which collects them from the models'
repositories). Of each are kept: the marks that stand in it, those that it writes before an answer,
and its texts for an answer that calls a tool and for one with thoughts. A template that is repaired
(profiles/chat_templates.yaml) has a second row: there the answer calls the tool twice.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from gateway.engines.common.chat.repair import repair_template
from gateway.profiles.profiles import Profiles

KEPT = Path(__file__).with_suffix(".json")
# Tags of all kinds, and words that templates are told by.
MARK = re.compile(
    r"<[^\s<>{}'\"]{2,40}>?|\]<\][^\s{}'\"]{2,30}|\[[A-Z_]{4,20}\]|◁[^▷]{2,8}▷|`{3}json"
    r"|\{function-name\}\n<\w+>"
)
WORDS = (
    "ipython", "enable_thinking", "set thinking", "truncate_history_thinking", "defer_loading",
    "thought process", "commentary", "analysis",
    "All available function signatures are listed below", "\uff5cDSML\uff5c", "function_calls>",
    "tool_calls>", "<|tool_call>call:",
    "[gMASK]<sop>", "<role>ASSISTANT</role>", "<function name=", "<param name=",
    "{function-name}\n<arg_key>",
)  # fmt: skip
PROMPT = "add_generation_prompt"
NAME, ARGUMENTS = "get_weather", {"city": "Paris", "days": 3}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "its name"},
                    "days": {"type": "integer", "description": "how many"}},
                "required": ["city", "days"],
            },
        },
    }
]  # fmt: skip
ASKED = [{"role": "user", "content": "What weather has Paris?"}]
REPAIRED = " repaired"
THOUGHT, ANSWER = "He asks for the weather.", "It is sunny."


class Dialect(NamedTuple):
    """The kept row of one template."""

    name: str
    marks: list[str]
    before: list[str]
    calls: str | None
    thinks: str | None

    @property
    def times(self) -> int:
        """How many calls are in `calls`."""
        return 2 if self.name.endswith(REPAIRED) else 1

    def template(self) -> str:
        """The meaning of its marks, as far as a table of marks can tell."""
        return f"{' '.join(self.marks)} {PROMPT} {' '.join(self.before)}"


def kept_dialects() -> list[Dialect]:
    return [Dialect(**row) for row in json.loads(KEPT.read_text())]


def marks(text: str) -> list[str]:
    return sorted(set(MARK.findall(text)) | {word for word in WORDS if word in text})


def render(text: str, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
    """As transformers renders chat templates (utils/chat_template_utils.py)."""
    jinja2: Any = importlib.import_module("jinja2.sandbox")

    def refuse(message: str) -> None:
        raise ValueError(message)

    def as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    sandboxed_environment = jinja2.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandboxed_environment.filters["tojson"] = as_json
    sandboxed_environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda format_: datetime(2026, 1, 1, tzinfo=UTC).strftime(format_),
    }
    # `{% generation %}` marks the text that a model learns from, and renders nothing.
    plain = re.sub(
        r"\bgeneration(?= *-?%})", "if true", re.sub(r"\bendgeneration(?= *-?%})", "endif", text)
    )
    variables = {
        "messages": messages,
        "tools": TOOLS,
        "add_generation_prompt": prompt,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    return str(sandboxed_environment.from_string(plain).render(variables))


def common_prefix_length(text: str, other_text: str) -> int:
    """How many characters both begin with."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other_text, strict=False))
    )


def continuation(text: str, answer: dict[str, Any], names: str) -> str | None:
    """The text behind the prompt where the answer is `answer`; None: the template takes no such
    answer, or writes nothing of it."""
    jinja2: Any = importlib.import_module("jinja2")
    for content in (answer["content"], None):
        for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
            document = json.loads(json.dumps({**answer, "content": content}))
            for call in document.get("tool_calls", []):
                call["function"]["arguments"] = arguments
            try:
                request_text = render(text, ASKED)
                prompt_text = render(text, ASKED, prompt=True)
                whole = render(text, [*ASKED, document])
            except (jinja2.TemplateError, TypeError, ValueError):
                continue
            common = common_prefix_length(prompt_text, whole)
            if common < len(request_text.rstrip()):
                common = common_prefix_length(request_text, whole)
            # Where the prompt has begun a tag that the answer has too, the tag is the answer's.
            start = whole.rfind("<", 0, common)
            common = (
                start
                if start > whole.rfind(">", 0, common) and common < len(prompt_text)
                else common
            )
            if names in whole[common:]:
                return whole[common:]
    return None


def matching_dialects(folder: Path) -> Iterator[Dialect]:
    for path in sorted(folder.glob("*.jinja")):
        text = path.read_text()
        call = {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": NAME, "arguments": ARGUMENTS},
        }
        calls = continuation(text, {"role": "assistant", "content": "", "tool_calls": [call]}, NAME)
        thinks = continuation(
            text,
            {
                "role": "assistant",
                "content": ANSWER,
                "reasoning_content": THOUGHT,
                "thinking": THOUGHT,
            },
            THOUGHT,
        )
        before = marks(text[text.rfind(PROMPT) :]) if PROMPT in text else []
        yield Dialect(path.stem, marks(text), before, calls, thinks)
        repaired_text, faults = repair_template(text, Profiles().parsers.repairs)
        if faults:
            twice = continuation(
                repaired_text,
                {"role": "assistant", "content": "", "tool_calls": [call, call]},
                NAME,
            )
            yield Dialect(f"{path.stem}{REPAIRED}", marks(repaired_text), before, twice, None)


def main() -> None:
    rows = [
        json.dumps(dialect._asdict(), ensure_ascii=False)
        for dialect in matching_dialects(Path(sys.argv[1]))
    ]
    sys.stdout.write("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main()
