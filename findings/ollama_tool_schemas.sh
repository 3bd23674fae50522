#!/usr/bin/env bash
# ollama 0.6.3: the schema of a tool loses most of its keywords before the client sends it. Of each
# parameter, only type, items, description and enum are left. The members of a nested object, anyOf,
# $ref, const, pattern and default are gone, and so is additionalProperties of the whole. pydantic
# writes an optional parameter as anyOf and a nested model as $ref, so the model is shown two
# parameters of no type. Here 8 of 10 keywords are lost. No warning tells it. Schemas within `items`
# stay whole.
# Seen on 2026-11-30: nested type, optional nothing, model nothing, constant nothing, code type,
# list type items, False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'ollama==0.6.3'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import ollama

message = {"role": "assistant", "content": "x"}
answer = {"model": "m", "created_at": "2026-11-30T00:00:00Z", "message": message, "done": True}
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

place = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
parameters = {
    "nested": place,
    "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "model": {"$ref": "#/$defs/Place"},
    "constant": {"const": 3},
    "code": {"type": "string", "pattern": "^x", "default": "x"},
    "list": {"type": "array", "items": place},
}
schema = {"type": "object", "properties": parameters, "additionalProperties": False}
schema |= {"$defs": {"Place": place}}
tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
question = [{"role": "user", "content": "x"}]
ollama.Client(host=url).chat(model="m", messages=question, tools=[tool])
sent = requests[-1]["tools"][0]["function"]["parameters"]
words = [f"{name} {' '.join(sent['properties'][name]) or 'nothing'}" for name in parameters]
assert sent["properties"]["list"] == parameters["list"]
print(", ".join(words), "additionalProperties" in sent, sep=", ")
PY
)
echo "$output"
expected="nested type, optional nothing, model nothing, constant nothing, code type, list type"
expected+=" items, False"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
