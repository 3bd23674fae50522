#!/usr/bin/env bash
# huggingface_hub 2.4.0: without a network, `snapshot_download` returns the folder of a revision as
# soon as one file of it was ever loaded, even if no file matches `allow_patterns`. A planner that
# loaded only the configuration gets a folder without weights, and no error. Only
# `hf_hub_download` tells that a file is missing. An offline start has to look for each file itself.
# Seen on 2026-11-30: config.json loaded; offline: all files: config.json, *.safetensors: a folder
# with config.json, model.safetensors: LocalEntryNotFoundError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'huggingface_hub==2.4.0'
export HF_HOME="$folder/home" HF_HUB_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_PROGRESS_BARS=1
output=$("$folder/venv/bin/python" - <<'PY'
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200)
        self.send_header("ETag", '"digest"')
        self.send_header("X-Repo-Commit", "0123456789" * 4)
        self.send_header("Content-Length", "2")
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(b"{}")

    def log_message(self, *arguments):
        pass


hub = HTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=hub.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{hub.server_port}"
loaded = hf_hub_download("maker/model", "config.json", endpoint=url)
hub.shutdown()


def snapshot(patterns=None):
    path = snapshot_download("maker/model", local_files_only=True, allow_patterns=patterns)
    return " ".join(os.listdir(path))


print(os.path.basename(loaded), "loaded; offline: all files:", snapshot(), end=", ")
print("*.safetensors: a folder with", snapshot("*.safetensors"), end=", ")
try:
    print(hf_hub_download("maker/model", "model.safetensors", local_files_only=True))
except LocalEntryNotFoundError as error:
    print("model.safetensors:", type(error).__name__)
PY
)
echo "$output"
expected="config.json loaded; offline: all files: config.json"
expected+=", *.safetensors: a folder with config.json"
[ "$output" = "$expected, model.safetensors: LocalEntryNotFoundError" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
