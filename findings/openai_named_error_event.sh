#!/usr/bin/env bash
# openai 3.57.0: a chat stream's event of the name `error` is an error to the client only if its
# data has a member `error`. Without that member (data {"message": ...}) the event is given to the
# user as a chunk whose `choices` is None, and the stream ends in order.
# Seen on 2026-11-28: with member: APIError, without: chunk with choices None
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'openai==3.57.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai

data = {}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(f"event: error\ndata: {json.dumps(data)}\n\n".encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)


def outcome(content):
    global data
    data = content
    messages = [{"role": "user", "content": "x"}]
    try:
        (chunk,) = client.chat.completions.create(model="m", messages=messages, stream=True)
    except openai.APIError as error:
        return type(error).__name__
    return f"chunk with choices {chunk.choices}"


details = {"message": "out of memory", "code": 500}
print(f"with member: {outcome({'error': details})}, without: {outcome(details)}")
PY
)
echo "$output"
[ "$output" = "with member: APIError, without: chunk with choices None" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
