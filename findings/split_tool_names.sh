#!/usr/bin/env bash
# openai-agents 0.24.0, smolagents 1.26.0 and semantic-kernel 1.44.0 beside openai 3.57.0: the name
# of a tool that a stream sends in two pieces has three readings. The openai client joins the
# pieces, as all texts of deltas, two libraries keep the last one, and one keeps the first. A model
# then calls a tool that does not exist. A gateway that forwards names token by token has to hold a
# name until it is whole.
# Seen on 2026-11-30: openai get_weather, openai-agents weather, smolagents weather,
# semantic-kernel get_
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'openai==3.57.0' 'openai-agents==0.24.0' \
    'smolagents==1.26.0' 'semantic-kernel==1.44.0' 'httpx==0.28.1'
output=$("$folder/venv/bin/python" - <<'PY'
import asyncio
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import agents
import openai
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from smolagents import ChatMessage, OpenAIModel
from smolagents.models import agglomerate_stream_deltas

logging.disable()


def chunk(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


def call(name, **members):
    return {"tool_calls": [{"index": 0, "function": {"name": name, "arguments": ""}} | members]}


begin = call("get_", id="call", type="function")
rest = {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
deltas = ({"role": "assistant"} | begin, call("weather"), rest)
stream = "".join(map(chunk, deltas)) + chunk({}, "tool_calls") + "data: [DONE]\n\n"


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(stream.encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
agents.set_tracing_disabled(True)


async def agents_name():
    client = openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0)
    agent = agents.Agent(
        name="a",
        model=agents.OpenAIChatCompletionsModel(model="m", openai_client=client),
        tools=[],
    )
    run = agents.Runner.run_streamed(agent, "x", max_turns=1)
    names = []
    try:
        async for event in run.stream_events():
            data = getattr(event, "data", None)
            if getattr(data, "type", "") == "response.completed":
                names += [item.name for item in data.response.output]
    except agents.AgentsException:
        pass
    return names[0]


async def kernel_name():
    client = openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0)
    service = OpenAIChatCompletion(ai_model_id="m", async_client=client)
    history = ChatHistory()
    history.add_user_message("x")
    parts = service.get_streaming_chat_message_contents(
        history, OpenAIChatPromptExecutionSettings()
    )
    whole = None
    async for (part,) in parts:
        whole = part if whole is None else whole + part
    return next(item.name for item in whole.items if isinstance(item, FunctionCallContent))


client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)
with client.chat.completions.stream(
    model="m", messages=[{"role": "user", "content": "x"}]
) as parts:
    tool = parts.get_final_completion().choices[0].message.tool_calls[0]
print("openai", tool.function.name, end=", ")
print("openai-agents", asyncio.run(agents_name()), end=", ")
model = OpenAIModel(model_id="m", api_base=url, api_key="key", client_kwargs={"max_retries": 0})
question = ChatMessage(role="user", content=[{"type": "text", "text": "x"}])
answer = agglomerate_stream_deltas(list(model.generate_stream([question])))
print("smolagents", answer.tool_calls[0].function.name, end=", ")
print("semantic-kernel", asyncio.run(kernel_name()))
PY
)
echo "$output"
expected="openai get_weather, openai-agents weather, smolagents weather, semantic-kernel get_"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
