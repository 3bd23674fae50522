#!/usr/bin/env bash
# langchain-openai 1.7.4 and haystack-ai 3.4.1: the refusal of a chat stream is lost, without an
# error. Its pieces come in the field `refusal` of the deltas, and both give an empty answer that
# stopped in order. Without streaming, langchain-openai keeps the refusal. A gateway whose filter
# refuses an answer shows the user of these libraries nothing at all.
# Seen on 2026-11-30: whole: langchain-openai 'I cannot'; stream: openai 'I cannot',
# langchain-openai '' None stop, haystack None stop
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'langchain-openai==1.7.4' 'langchain-core==1.8.3' \
    'openai==3.57.0' 'haystack-ai==3.4.1'
export HAYSTACK_TELEMETRY_ENABLED=False
output=$("$folder/venv/bin/python" -W ignore - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret
from langchain_openai import ChatOpenAI

head = {"id": "c", "created": 1, "model": "m"}


def chunk(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    event = head | {"object": "chat.completion.chunk", "choices": [choice]}
    return f"data: {json.dumps(event)}\n\n"


deltas = ({"role": "assistant", "refusal": "I can"}, {"refusal": "not"})
stream = "".join(map(chunk, deltas)) + chunk({}, "stop") + "data: [DONE]\n\n"
message = {"role": "assistant", "content": None, "refusal": "I cannot"}
choice = {"index": 0, "message": message, "finish_reason": "stop"}
answer = json.dumps(head | {"object": "chat.completion", "choices": [choice]})


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = "text/event-stream" if request.get("stream") else "application/json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write((stream if request.get("stream") else answer).encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
model = ChatOpenAI(model="m", base_url=url, api_key="key", max_retries=0)
refusal = model.invoke("x").additional_kwargs.get("refusal")
print(f"whole: langchain-openai {refusal!r}", end="; ")
client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)
with client.chat.completions.stream(
    model="m", messages=[{"role": "user", "content": "x"}]
) as parts:
    refusal = parts.get_final_completion().choices[0].message.refusal
print(f"stream: openai {refusal!r}", end=", ")
first, *rest = model.stream("x")
for part in rest:
    first += part
refusal, reason = first.additional_kwargs.get("refusal"), first.response_metadata["finish_reason"]
print(f"langchain-openai {first.content!r} {refusal} {reason}", end=", ")
generator = OpenAIChatGenerator(
    model="m",
    api_base_url=url,
    api_key=Secret.from_token("key"),
    streaming_callback=lambda part: None,
)
(reply,) = generator.run([ChatMessage.from_user("x")])["replies"]
assert "I can" not in str(reply.to_dict())
print("haystack", reply.text, reply.meta["finish_reason"])
PY
)
echo "$output"
expected="whole: langchain-openai 'I cannot'; stream: openai 'I cannot'"
expected+=", langchain-openai '' None stop, haystack None stop"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
