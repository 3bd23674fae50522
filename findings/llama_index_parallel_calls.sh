#!/usr/bin/env bash
# llama-index-llms-openai 0.8.3: of the tool calls of one chunk, only the first one is read, and
# pieces of two calls that alternate become calls of their own, without a name. No error tells it.
# A server that parses the whole answer at once sends all calls in one chunk, and `index` is there
# for pieces in any order. openai 2.54.0, which it is built on, reads both streams.
# Seen on 2026-11-30: one chunk: openai f g, llama-index f; alternating: openai f g, llama-index f
# g - -
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'llama-index-llms-openai-like==0.8.1' \
    'llama-index-llms-openai==0.8.3' 'llama-index-core==0.14.25' 'openai==2.54.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

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
url = f"http://127.0.0.1:{server.server_port}/v1"
client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)
model = OpenAILike(
    model="m",
    api_base=url,
    api_key="key",
    max_retries=0,
    is_chat_model=True,
    is_function_calling_model=True,
)


def chunk(*calls, finish_reason=None):
    delta = {"role": "assistant", "tool_calls": list(calls)} if calls else {}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


def begin(index, arguments=""):
    function = {"name": "fg"[index], "arguments": arguments}
    return {"index": index, "id": str(index), "type": "function", "function": function}


def piece(index, arguments):
    return {"index": index, "function": {"arguments": arguments}}


def names(*chunks):
    global stream
    stream = "".join((*chunks, chunk(finish_reason="tool_calls"), "data: [DONE]\n\n"))
    with client.chat.completions.stream(
        model="m", messages=[{"role": "user", "content": "x"}]
    ) as parts:
        calls = parts.get_final_completion().choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == ['{"x": 1}', '{"y": 2}']
    *_, last = model.stream_chat([ChatMessage(role="user", content="x")])
    blocks = [block for block in last.message.blocks if block.block_type == "tool_call"]
    one = " ".join(call.function.name for call in calls)
    return f"openai {one}, llama-index {' '.join(block.tool_name or '-' for block in blocks)}"


print("one chunk:", names(chunk(begin(0, '{"x": 1}'), begin(1, '{"y": 2}'))), end="; ")
alternating = (begin(0, '{"x": '), begin(1, '{"y": '), piece(0, "1}"), piece(1, "2}"))
print("alternating:", names(*map(chunk, alternating)))
PY
)
echo "$output"
expected="one chunk: openai f g, llama-index f"
expected+="; alternating: openai f g, llama-index f g - -"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
