#!/usr/bin/env bash
# pydantic-ai-slim 2.38.0: a chunk of a chat stream whose whole content is `<think>` begins a
# thought, wherever it stands. If an answer speaks about that tag, and the tokenizer has a token
# for it, all text behind it is missing in the output, without an error. A model that thinks in a
# field of its own (`reasoning_content`) is treated the same. The same text in other pieces is
# whole.
# Seen on 2026-11-29: one chunk: 'Write ', other pieces: 'Write <think> first.'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'pydantic-ai-slim[openai]==2.38.0' 'openai==3.57.0'
output=$("$folder/venv/bin/python" - <<'PY'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

stream = ""


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


def chunk(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


async def output(*pieces):
    global stream
    stream = chunk({"role": "assistant", "reasoning_content": "A tag is asked for."})
    stream += "".join(chunk({"content": piece}) for piece in pieces)
    stream += chunk({}, "stop") + "data: [DONE]\n\n"
    url = f"http://127.0.0.1:{server.server_port}/v1"
    client = openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0)
    model = OpenAIChatModel("m", provider=OpenAIProvider(openai_client=client))
    async with Agent(model).run_stream("x") as answer:
        return await answer.get_output()


print(f"one chunk: {asyncio.run(output('Write ', '<think>', ' first.'))!r}", end=", ")
print(f"other pieces: {asyncio.run(output('Write <th', 'ink>', ' first.'))!r}")
PY
)
echo "$output"
expected="one chunk: 'Write ', other pieces: 'Write <think> first.'"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
