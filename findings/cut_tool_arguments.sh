#!/usr/bin/env bash
# anthropic 2.14.0 (with jiter 0.19.0) and langchain-openai 1.7.4: where the token limit cuts a
# tool call within a number, the part before the cut is the number in the final message. A call
# that was to transfer 1250 asks for 12, in a dictionary that looks complete. A text that is cut
# is left out by anthropic and kept by langchain. Who runs tools has to look at the reason of the
# end first.
# Seen on 2026-11-29: anthropic {'amount': 12} {}, langchain-openai {'amount': 12} {'name': 'ab'}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'anthropic==2.14.0' 'jiter==0.19.0' \
    'langchain-openai==1.7.4' 'langchain-core==1.8.3'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic
from langchain_openai import ChatOpenAI

stream = ""


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
url = f"http://127.0.0.1:{server.server_port}"


def event(kind, **rest):
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **rest})}\n\n"


def of_anthropic(arguments):
    global stream
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": []}
    message |= {"stop_reason": None, "stop_sequence": None}
    message["usage"] = {"input_tokens": 1, "output_tokens": 1}
    tool = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    delta = {"type": "input_json_delta", "partial_json": arguments}
    stream = event("message_start", message=message)
    stream += event("content_block_start", index=0, content_block=tool)
    stream += event("content_block_delta", index=0, delta=delta)
    stream += event("content_block_stop", index=0)
    end = {"stop_reason": "max_tokens", "stop_sequence": None}
    stream += event("message_delta", delta=end, usage={"output_tokens": 5})
    stream += event("message_stop")
    client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0)
    messages = [{"role": "user", "content": "x"}]
    with client.messages.stream(model="m", max_tokens=5, messages=messages) as parts:
        answer = parts.get_final_message()
    assert answer.stop_reason == "max_tokens"
    return answer.content[0].input


def chunk(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


def of_langchain(arguments):
    global stream
    call = {"index": 0, "id": "t", "type": "function"}
    call["function"] = {"name": "f", "arguments": arguments}
    stream = chunk({"tool_calls": [call]}) + chunk({}, "length") + "data: [DONE]\n\n"
    model = ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="key", max_retries=0)
    first, *rest = model.stream("x")
    for part in rest:
        first += part
    assert not first.invalid_tool_calls
    return first.tool_calls[0]["args"]


cuts = ('{"amount": 12', '{"name": "ab')
print("anthropic", *map(of_anthropic, cuts), end=", ")
print("langchain-openai", *map(of_langchain, cuts))
PY
)
echo "$output"
expected="anthropic {'amount': 12} {}, langchain-openai {'amount': 12} {'name': 'ab'}"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
