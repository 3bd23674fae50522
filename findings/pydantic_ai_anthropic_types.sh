#!/usr/bin/env bash
# pydantic-ai-slim 2.38.0 with anthropic 2.14.0: a question to a Claude model cannot be sent. The
# library calls BetaMessageParam like a class, and in this version of the client the name is a
# union of types, so a TypeError is raised before a byte is sent. The requirement is `>=1.3.0`, so
# pip chooses that client. The same question by the OpenAI model is sent.
# Seen on 2026-11-30: anthropic: TypeError, 0 requests; openai: answer, 1 request
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'pydantic-ai-slim[anthropic,openai]==2.38.0' \
    'anthropic==2.14.0' 'openai==3.57.0'
output=$("$folder/venv/bin/python" - <<'PY'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic
import openai
from pydantic_ai.direct import model_request
from pydantic_ai.messages import ModelRequest
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

count = 0
message = {"role": "assistant", "content": "ab"}
answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
answer |= {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        global count
        count += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
settings = {"api_key": "key", "max_retries": 0}
one = anthropic.AsyncAnthropic(base_url=url, **settings)
two = openai.AsyncOpenAI(base_url=f"{url}/v1", **settings)


def outcome(model):
    global count
    count = 0
    try:
        asyncio.run(model_request(model, [ModelRequest.user_text_prompt("x")]))
        name = "answer"
    except TypeError as error:
        name = type(error).__name__
    return f"{name}, {count} request" + "s" * (count != 1)


provider = AnthropicProvider(anthropic_client=one)
print("anthropic:", outcome(AnthropicModel("m", provider=provider)), end="; ")
print("openai:", outcome(OpenAIChatModel("m", provider=OpenAIProvider(openai_client=two))))
PY
)
echo "$output"
expected="anthropic: TypeError, 0 requests; openai: answer, 1 request"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
