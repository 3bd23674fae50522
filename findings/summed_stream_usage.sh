#!/usr/bin/env bash
# langchain-openai 1.7.4 and pydantic-ai-slim 2.38.0: the usage of a chat stream is the sum over
# its chunks. vLLM sends the usage so far with every chunk if the option `continuous_usage_stats`
# is on, so a prompt of 10 tokens with an answer of 2 counts as 30 and 5. The openai client shows
# each chunk's own usage, and the last one is right. A server that sends running totals makes
# users of these libraries see too many tokens and too high costs.
# Seen on 2026-11-29: openai 10 2, langchain-openai 30 5, pydantic-ai 30 5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'langchain-openai==1.7.4' 'langchain-core==1.8.3' \
    'pydantic-ai-slim[openai]==2.38.0' 'openai==3.57.0'
output=$("$folder/venv/bin/python" - <<'PY'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def chunk(text, finish_reason, count):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 10, "completion_tokens": count, "total_tokens": 10 + count}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice], 'usage': usage})}\n\n"


stream = chunk("a", None, 1) + chunk("b", None, 2) + chunk("", "stop", 2) + "data: [DONE]\n\n"


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


def of_openai():
    client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)
    messages = [{"role": "user", "content": "x"}]
    *_, last = client.chat.completions.create(model="m", messages=messages, stream=True)
    return last.usage.prompt_tokens, last.usage.completion_tokens


def of_langchain():
    model = ChatOpenAI(model="m", base_url=url, api_key="key", max_retries=0, stream_usage=True)
    first, *rest = model.stream("x")
    for part in rest:
        first += part
    assert first.content == "ab"
    return first.usage_metadata["input_tokens"], first.usage_metadata["output_tokens"]


async def of_pydantic_ai():
    client = openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0)
    model = OpenAIChatModel("m", provider=OpenAIProvider(openai_client=client))
    async with Agent(model).run_stream("x") as answer:
        assert await answer.get_output() == "ab"
        usage = answer.usage() if callable(answer.usage) else answer.usage
        return usage.input_tokens, usage.output_tokens


print("openai", *of_openai(), end=", ")
print("langchain-openai", *of_langchain(), end=", ")
print("pydantic-ai", *asyncio.run(of_pydantic_ai()))
PY
)
echo "$output"
expected="openai 10 2, langchain-openai 30 5, pydantic-ai 30 5"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
