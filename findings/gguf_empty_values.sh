#!/usr/bin/env bash
# gguf 0.19.0: GGUFWriter drops a key whose value is an empty string or an empty list, without an
# error. A reader cannot tell "stated as empty" (a chat template that adds nothing, no added tokens)
# from "not stated". The format has both values: a list may hold empty strings.
# Seen on 2026-11-28: written: empty_text, empty_list, list_of_empty; read: list_of_empty
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'gguf==0.19.0'
output=$("$folder/venv/bin/python" - "$folder/model.gguf" <<'PY'
import sys

import gguf

writer = gguf.GGUFWriter(sys.argv[1], "llama")
writer.add_string("empty_text", "")
writer.add_array("empty_list", [])
writer.add_array("list_of_empty", ["", ""])
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()
fields = gguf.GGUFReader(sys.argv[1]).fields
print("read:", *(name for name in fields if "empty" in name))
PY
)
echo "$output"
[ "$output" = "read: list_of_empty" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
