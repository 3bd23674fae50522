#!/usr/bin/env bash
# litellm 1.110.2: a stream with n=2 has one end for all of its answers. The reasons of the other
# choices are dropped, and `stream_chunk_builder` gives each answer the reason of the first one. An
# answer that the token limit cut is a complete one to the user, and a gateway built on it counts no
# cut answers. openai 2.54.0 shows both reasons in its chunks.
# Seen on 2026-11-30: openai stop length, litellm stop, built stop stop
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


def chunk(index, delta, finish_reason=None):
    choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


stream = "".join(chunk(i, {"role": "assistant", "content": "ab"[i]}) for i in (0, 1))
stream += chunk(0, {}, "stop") + chunk(1, {"content": "c"}) + chunk(1, {}, "length")
stream += "data: [DONE]\n\n"


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
litellm.suppress_debug_info = True
request = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 2}
client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)


def ends(parts):
    return " ".join(c.finish_reason for part in parts for c in part.choices if c.finish_reason)


one = ends(client.chat.completions.create(model="m", **request))
parts = list(
    litellm.completion(model="openai/m", api_base=url, api_key="key", max_retries=0, **request)
)
built = litellm.stream_chunk_builder(parts).choices
assert [choice.message.content for choice in built] == ["a", "bc"]
print(f"openai {one}, litellm {ends(parts)}, built", *(choice.finish_reason for choice in built))
PY
)
echo "$output"
expected="openai stop length, litellm stop, built stop stop"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
