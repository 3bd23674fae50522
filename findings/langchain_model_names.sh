#!/usr/bin/env bash
# langchain-openai 1.7.4: what is sent to any OpenAI compatible server depends on the name of the
# model. A name that begins with gpt-5 loses the user's temperature without a warning, so 0 becomes
# the server's own. One that begins with o and a digit gets temperature 1 where the user set none,
# in place of the value that generation_config.json recommends, and its system prompt has the role
# `developer`, which chat templates of open models do not know. A gateway gives a fine-tuned model
# such a name at this price.
# Seen on 2026-11-30: gpt-5-tuned: 0 is None, unset is None, system; o1-tuned: 0 is 0.0, unset is
# 1.0, developer; tuned: 0 is 0.0, unset is None, system
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'langchain-openai==1.7.4' 'langchain-core==1.8.3' \
    'openai==3.57.0'
output=$("$folder/venv/bin/python" -W ignore - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from langchain_openai import ChatOpenAI

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


def sent(name, **settings):
    model = ChatOpenAI(model=name, base_url=url, api_key="key", max_retries=0, **settings)
    model.invoke([("system", "s"), ("user", "x")])
    return requests[-1]


lines = []
for name in ("gpt-5-tuned", "o1-tuned", "tuned"):
    temperatures = sent(name, temperature=0.0).get("temperature"), sent(name).get("temperature")
    role = sent(name)["messages"][0]["role"]
    lines.append(f"{name}: 0 is {temperatures[0]}, unset is {temperatures[1]}, {role}")
print("; ".join(lines))
PY
)
echo "$output"
expected="gpt-5-tuned: 0 is None, unset is None, system; o1-tuned: 0 is 0.0, unset is 1.0, "
expected+="developer; tuned: 0 is 0.0, unset is None, system"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
