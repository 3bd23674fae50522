#!/usr/bin/env bash
# litellm 1.110.2: of a refusal that arrives in pieces, only the first one is given to the user.
# Chunks whose delta has nothing but `refusal` are dropped, so "I can" is left of "I cannot do
# that". openai 2.54.0 joins the pieces.
# Seen on 2026-11-30: openai 'I cannot do that.', litellm 'I can'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'litellm==1.110.2' 'openai==2.54.0'
export LITELLM_LOCAL_MODEL_COST_MAP=True
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import litellm
import openai


def chunk(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


deltas = ({"role": "assistant", "refusal": "I can"}, {"refusal": "not"}, {"refusal": " do that."})
stream = "".join(map(chunk, deltas)) + chunk({}, "stop") + "data: [DONE]\n\n"


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
messages = [{"role": "user", "content": "x"}]
client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)
with client.chat.completions.stream(model="m", messages=messages) as parts:
    one = parts.get_final_completion().choices[0].message.refusal
chunks = litellm.completion(
    model="openai/m", api_base=url, api_key="key", messages=messages, stream=True, max_retries=0
)
refusals = (getattr(part.choices[0].delta, "refusal", None) for part in chunks)
print(f"openai {one!r}, litellm {''.join(filter(None, refusals))!r}")
PY
)
echo "$output"
expected="openai 'I cannot do that.', litellm 'I can'"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
