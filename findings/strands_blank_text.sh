#!/usr/bin/env bash
# strands-agents 1.62.0: a streamed refusal becomes the answer "[blank text]" in the conversation.
# The refusal stands in the field `refusal` of the deltas. The agent reports a normal end without
# text, and sends the placeholder with the next request as words of the model. So the model reads
# an answer that it never gave, and nobody reads the refusal.
# Seen on 2026-12-01: end_turn, texts of the next request: Hello / [blank text] / Why?
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'strands-agents[openai]==1.62.0' 'openai==2.54.0'
output=$("$folder/venv/bin/python" -W ignore - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from strands import Agent
from strands.models.openai import OpenAIModel

requests = []


def event(delta, finish_reason=None):
    fields = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return f"data: {json.dumps(fields | {'choices': choices})}\n\n"


STREAM = (
    event({"role": "assistant", "content": None, "refusal": "I can"})
    + event({"refusal": "not."})
    + event({}, "stop")
    + "data: [DONE]\n\n"
)


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(STREAM.encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
connection = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "key"}
agent = Agent(model=OpenAIModel(client_args=connection, model_id="m"), callback_handler=None)
reason = agent("Hello").stop_reason
agent("Why?")
texts = [part["text"] for message in requests[1]["messages"] for part in message["content"]]
print(f"{reason}, texts of the next request: {' / '.join(texts)}")
PY
)
expected='end_turn, texts of the next request: Hello / [blank text] / Why?'
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
