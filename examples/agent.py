"""An agent that answers a question with the help of a calculator.

    pip install openai
    python examples/agent.py MODEL "What is 17 * 23?"

The model must support tool calls: `fitserve show MODEL` lists this under "For apps".
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI

MAX_CALLS = 4
OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculate with two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "operation": {"type": "string", "enum": [*OPERATIONS]},
                    "a": {"type": "number"},
                    "b": {"type": "number"},
                },
                "required": ["operation", "a", "b"],
            },
        },
    }
]


def calculate(operation: str, a: float, b: float) -> float:
    return OPERATIONS[operation](a, b)


def call_tool(arguments: str) -> str:
    """The result of a tool call as text. The model reads errors too, and can correct itself."""
    try:
        return str(calculate(**json.loads(arguments)))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error}"


def answer(client: OpenAI, model: str, question: str) -> str:
    """The final answer, after at most MAX_CALLS rounds of tool calls."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        reply = client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            if call.type != "function":
                continue
            result = call_tool(call.function.arguments)
            print(f"calculate({call.function.arguments}) = {result}", file=sys.stderr)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    reply = client.chat.completions.create(model=model, messages=messages)
    return reply.choices[0].message.content or ""


def main() -> None:
    client = OpenAI(
        base_url=os.environ.get("FITSERVE_URL", "http://127.0.0.1:8080") + "/v1",
        api_key=os.environ.get("FITSERVE_KEY", "none"),
    )
    print(answer(client, sys.argv[1], " ".join(sys.argv[2:])))


if __name__ == "__main__":
    main()
