#!/usr/bin/env bash
# partial-json-parser 0.2.1.1.post7: a text that ends between the two halves of an escaped
# surrogate pair is parsed into a string with half a character, which cannot be encoded. Tool calls
# that are streamed token by token pass through this state wherever a model escapes a character
# beyond U+FFFF. An unfinished escape of four digits is left out as it should be.
# Seen on 2026-11-28: the first text that cannot be encoded is {"key": "\ud835
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'partial-json-parser==0.2.1.1.post7'
output=$("$folder/venv/bin/python" - <<'PY'
import json

from partial_json_parser import loads

whole = json.dumps({"key": "\N{MATHEMATICAL BOLD CAPITAL A}"})
failed = []
for length in range(1, len(whole) + 1):
    try:
        loads(whole[:length]).get("key", "").encode()
    except UnicodeEncodeError:
        failed.append(whole[:length])
print(failed[0], len(failed) < 12, loads(whole)["key"] == "\N{MATHEMATICAL BOLD CAPITAL A}")
PY
)
echo "$output"
[ "$output" = '{"key": "\ud835 True True' ] || { echo "The behaviour changed: $output" >&2; exit 1; }
