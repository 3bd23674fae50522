#!/usr/bin/env bash
# gguf 0.19.0: GGUFReader flattens an array of arrays. Two rows that GGUFWriter wrote come back from
# `contents()` as one list without the rows' lengths, although the file holds them.
# Seen on 2026-11-28: written [[1, 2], [3]], read [1, 2, 3] ARRAY ARRAY INT32
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'gguf==0.19.0'
output=$("$folder/venv/bin/python" - "$folder/model.gguf" <<'PY'
import sys

import gguf

writer = gguf.GGUFWriter(sys.argv[1], "llama")
writer.add_array("rows", [[1, 2], [3]])
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()
field = gguf.GGUFReader(sys.argv[1]).fields["rows"]
print(field.contents(), *(kind.name for kind in field.types))
PY
)
echo "$output"
case $output in
"[1, 2, 3] ARRAY ARRAY "*) ;;
*) echo "The behaviour changed: $output" >&2; exit 1 ;;
esac
