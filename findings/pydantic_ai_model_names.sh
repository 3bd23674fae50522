#!/usr/bin/env bash
# pydantic-ai-slim 2.38.0: a model of any OpenAI compatible server whose name begins with a small o
# is taken for one of OpenAI's reasoning models. The temperature, top_p and the penalties of the
# user are not sent, and a warning speaks of reasoning that is enabled. openai/gpt-oss-20b, olmo-3
# and openchat begin so: a temperature of 0 is the server's own, so extraction and tests differ from
# run to run. A capital letter, or the owner in front, keeps all four.
# Seen on 2026-11-30: openai/gpt-oss-20b 0 of 4, olmo-3 0 of 4, openchat 0 of 4, OLMo-3 4 of 4,
# allenai/olmo-3 4 of 4, qwen3 4 of 4
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'pydantic-ai-slim[openai]==2.38.0' 'openai==3.57.0'
output=$("$folder/venv/bin/python" -W ignore - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

message = {"role": "assistant", "content": "x"}
choice = {"index": 0, "message": message, "finish_reason": "stop"}
usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
answer |= {"choices": [choice], "usage": usage}
requests = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        requests.append(json.loads(body))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"

provider = OpenAIProvider(base_url=url, api_key="key")
settings = {"temperature": 0.0, "top_p": 0.5, "presence_penalty": 0.1, "frequency_penalty": 0.1}
words = []
for name in ("openai/gpt-oss-20b", "olmo-3", "openchat", "OLMo-3", "allenai/olmo-3", "qwen3"):
    Agent(OpenAIChatModel(name, provider=provider), model_settings=settings).run_sync("x")
    words.append(f"{name} {len(settings.keys() & requests[-1].keys())} of 4")
print(", ".join(words))
PY
)
echo "$output"
expected="openai/gpt-oss-20b 0 of 4, olmo-3 0 of 4, openchat 0 of 4, OLMo-3 4 of 4, "
expected+="allenai/olmo-3 4 of 4, qwen3 4 of 4"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
