#!/usr/bin/env bash
# semantic-kernel 1.44.0 and opentelemetry-instrumentation-openai-v2 2.4b0 with openai 3.57.0: a new
# environment cannot import either of them. Both import httpx and do not require it, since openai
# brought it along until version 2. The third version brings httpx2, and no bound keeps it out.
# With httpx installed, the instrumentation fails at a module that opentelemetry-util-genai 1.3b0,
# which pip chooses for it, does not have.
# Seen on 2026-11-30: semantic-kernel: httpx, then imported; instrumentation: httpx, then
# opentelemetry.util.genai.instruments
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
missing() {
    "$folder/$1/bin/python" - "$2" <<'PY'
import importlib
import sys

try:
    importlib.import_module(sys.argv[1])
    print("imported")
except ModuleNotFoundError as error:
    print(error.name)
PY
}
outcome() {
    python3 -m venv "$folder/$1"
    "$folder/$1/bin/pip" install --quiet 'openai==3.57.0' "${@:3}"
    local first
    first=$(missing "$1" "$2")
    "$folder/$1/bin/pip" install --quiet 'httpx==0.28.1'
    echo "$1: $first, then $(missing "$1" "$2")"
}
output=$(
    outcome semantic-kernel semantic_kernel.connectors.ai.open_ai 'semantic-kernel==1.44.0'
    outcome instrumentation opentelemetry.instrumentation.openai_v2 \
        'opentelemetry-instrumentation-openai-v2==2.4b0' 'opentelemetry-util-genai==1.3b0'
)
echo "$output"
expected="semantic-kernel: httpx, then imported"
expected+=$'\ninstrumentation: httpx, then opentelemetry.util.genai.instruments'
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
