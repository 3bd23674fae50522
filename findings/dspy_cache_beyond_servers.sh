#!/usr/bin/env bash
# dspy 3.4.1: answers are kept on disk, and the key of the cache leaves out `api_base`. Two servers
# with a model of one name share their answers, also in later processes. Someone who compares a
# quantized copy with the original, or a new gateway with the old one, gets the same score to the
# last digit, because the second server is never asked. It holds at any temperature. Of 4 questions
# here, 1 is sent. With cache=False, each is.
# Seen on 2026-11-30: asked original: original, quantized: original, original: original, quantized:
# original, requests 1; without cache: original: original, quantized: quantized
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'dspy==3.4.1' 'litellm==1.110.2'
export DSPY_CACHEDIR="$folder/cache" LITELLM_LOCAL_MODEL_COST_MAP=True
output=$("$folder/venv/bin/python" -W ignore - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import dspy

requests = {"original": 0, "quantized": 0}
usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def start(name):
    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            requests[name] += 1
            message = {"role": "assistant", "content": name}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
            answer |= {"choices": [choice], "usage": usage}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


urls = {name: start(name) for name in requests}


def ask(name, **options):
    model = dspy.LM("openai/m", api_base=urls[name], api_key="key", temperature=1.0, **options)
    (answer,) = model("Which server answers?")
    return answer if isinstance(answer, str) else answer["text"]


asked = " ".join(f"{name}: {ask(name)}," for name in [*urls, *urls])
print(f"asked {asked} requests {sum(requests.values())}", end="; ")
print("without cache:", ", ".join(f"{name}: {ask(name, cache=False)}" for name in urls))
PY
)
echo "$output"
expected="asked original: original, quantized: original, original: original, quantized: "
expected+="original, requests 1; without cache: original: original, quantized: quantized"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
