#!/usr/bin/env bash
# openai 3.57.0, anthropic 2.14.0, cohere 7.3.1, groq 1.7.0 and together 3.1.1: a 429 with
# Retry-After beyond 60 seconds has four readings. Two clients drop the header, and ask again within
# two seconds, both tries of theirs. One waits 60 seconds. openai waits 120 seconds and gives up at
# an hour, and anthropic waits an hour. A gateway that states 120 seconds for a model that loads
# gets 3 requests within 4 seconds from some users, and one that states an hour stops the thread of
# an anthropic user for two hours, beyond the timeout of 10 minutes. Up to 60 seconds, all wait.
# Seen on 2026-11-30: 60: openai 60 60, anthropic 60 60, cohere 60 60, groq 60 60, together 60 60;
# 120: openai 120 120, anthropic 120 120, cohere 60 60, groq short short, together short short;
# 3600: openai none, anthropic 3600 3600, cohere 60 60, groq short short, together short short
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'openai==3.57.0' 'anthropic==2.14.0' 'cohere==7.3.1' \
    'groq==1.7.0' 'together==3.1.1'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic
import cohere
import groq
import openai
import together

waits, header = [], {}
time.sleep = waits.append


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(429)
        self.send_header("Retry-After", header["Retry-After"])
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"error": {"message": "The model loads."}}).encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
question = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
options = {"base_url": url, "api_key": "key"}
clients = {
    "openai": openai.OpenAI(**options).chat.completions.create,
    "anthropic": lambda **words: anthropic.Anthropic(**options).messages.create(
        max_tokens=1, **words
    ),
    "cohere": cohere.ClientV2(**options).chat,
    "groq": groq.Groq(**options).chat.completions.create,
    "together": together.Together(**options).chat.completions.create,
}
lines = []
for seconds in (60, 120, 3600):
    header["Retry-After"] = str(seconds)
    words = []
    for name, ask in clients.items():
        waits.clear()
        try:
            ask(**question)
        except Exception as error:
            assert getattr(error, "status_code", 0) == 429, error
        seconds_seen = " ".join("short" if wait < 5 else f"{wait:.0f}" for wait in waits)
        words.append(f"{name} {seconds_seen or 'none'}")
    lines.append(f"{seconds}: {', '.join(words)}")
print("; ".join(lines))
PY
)
echo "$output"
expected="60: openai 60 60, anthropic 60 60, cohere 60 60, groq 60 60, together 60 60; 120: "
expected+="openai 120 120, anthropic 120 120, cohere 60 60, groq short short, together short "
expected+="short; 3600: openai none, anthropic 3600 3600, cohere 60 60, groq short short, "
expected+="together short short"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
