#!/usr/bin/env bash
# openai 3.57.0: `chat.completions.stream()` needs the choices of n=2, and the tool calls of an
# answer, in the order of their indexes. If the first chunk belongs to choice 1, or the first call
# has index 1, an IndexError ends the stream. The index is there to tell them apart in any order,
# and langchain-openai 1.7.4 reads the same calls. A server that computes both at once has to hold
# chunks back.
# Seen on 2026-11-30: choices 0 1: a b, choices 1 0: IndexError, calls 0 1: f g, calls 1 0:
# IndexError, langchain-openai: g f
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'openai==3.57.0' 'langchain-openai==1.7.4' \
    'langchain-core==1.8.3'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
from langchain_openai import ChatOpenAI

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
url = f"http://127.0.0.1:{server.server_port}/v1"
client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)


def chunk(delta, finish_reason=None, index=0):
    choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


def call(index):
    function = {"name": "fg"[index], "arguments": "{}"}
    return {"tool_calls": [{"index": index, "id": str(index), "function": function}]}


def choices():
    with client.chat.completions.stream(
        model="m", n=2, messages=[{"role": "user", "content": "x"}]
    ) as parts:
        try:
            return parts.get_final_completion().choices
        except IndexError:
            return []


def texts(*order):
    global stream
    pieces = [chunk({"role": "assistant", "content": "ab"[index]}, None, index) for index in order]
    ends = [chunk({}, "stop", index) for index in order]
    stream = "".join(pieces + ends) + "data: [DONE]\n\n"
    return " ".join(choice.message.content for choice in choices()) or "IndexError"


def calls(*order):
    global stream
    pieces = [chunk({"role": "assistant"})] + [chunk(call(index)) for index in order]
    stream = "".join(pieces) + chunk({}, "tool_calls") + "data: [DONE]\n\n"
    tools = (tool.function.name for choice in choices() for tool in choice.message.tool_calls)
    return " ".join(tools) or "IndexError"


print(f"choices 0 1: {texts(0, 1)}, choices 1 0: {texts(1, 0)}", end=", ")
print(f"calls 0 1: {calls(0, 1)}, calls 1 0: {calls(1, 0)}", end=", ")
message, *rest = ChatOpenAI(model="m", base_url=url, api_key="key", max_retries=0).stream("x")
for part in rest:
    message += part
print("langchain-openai:", *(tool["name"] for tool in message.tool_calls))
PY
)
echo "$output"
expected="choices 0 1: a b, choices 1 0: IndexError, calls 0 1: f g, calls 1 0: IndexError"
[ "$output" = "$expected, langchain-openai: g f" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
