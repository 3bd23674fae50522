#!/usr/bin/env bash
# autogen-ext 0.7.5: a stream that counts tokens in each event ends with the reason `unknown`. The
# client takes a finish reason only from events without usage. vLLM and SGLang send usage in each
# event on request (`continuous_usage_stats`). An answer that was cut at its length limit then looks
# like any other. With one last event of usage the reason is kept.
# Seen on 2026-12-01: usage in the last event: length; usage in each event: unknown
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'autogen-ext[openai]==0.7.5' 'openai==2.54.0'
output=$("$folder/venv/bin/python" -W ignore - <<'PY'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

ABILITIES = ("vision", "function_calling", "json_output", "structured_output")


def event(choices, completion_tokens=None):
    fields = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    usage = None
    if completion_tokens is not None:
        total = 5 + completion_tokens
        usage = {"prompt_tokens": 5, "completion_tokens": completion_tokens, "total_tokens": total}
    return f"data: {json.dumps(fields | {'choices': choices, 'usage': usage})}\n\n"


def choice(text, finish_reason=None):
    delta = {"role": "assistant", "content": text}
    return [{"index": 0, "delta": delta, "finish_reason": finish_reason}]


STREAMS = {
    "last": event(choice("one")) + event(choice(" two", "length")) + event([], 2),
    "each": event(choice("one"), 1) + event(choice(" two", "length"), 2) + event([], 2),
}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write((STREAMS[request["model"]] + "data: [DONE]\n\n").encode())

    def log_message(self, *arguments):
        pass


async def finish_reason(name):
    client = OpenAIChatCompletionClient(
        model=name,
        base_url=f"http://127.0.0.1:{server.server_port}/v1",
        api_key="key",
        model_info=dict.fromkeys(ABILITIES, False) | {"family": "unknown"},
    )
    message = UserMessage(content="x", source="user")
    results = [item async for item in client.create_stream([message], include_usage=True)]
    assert results[-1].content == "one two"
    return results[-1].finish_reason


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
for name in STREAMS:
    print(f"usage in {'the ' * (name == 'last')}{name} event: {asyncio.run(finish_reason(name))}")
PY
)
expected='usage in the last event: length
usage in each event: unknown'
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
