#!/usr/bin/env bash
# json-repair 0.64.6: where a text needs any repair, correct escapes elsewhere in it change. A
# text loses the line breaks at its end (the last line break of a file that a model writes), an
# escaped slash keeps its backslash, and an escaped surrogate pair becomes two characters that
# cannot be encoded. Here only one comma is too many. Without it, the values are right.
# Seen on 2026-11-29: without repair: right, with repair: 'x = 1\n' -> 'x = 1', 'a/b' -> 'a\\/b',
# surrogate pair -> UnicodeEncodeError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'json-repair==0.64.6'
output=$("$folder/venv/bin/python" - <<'PY'
import json

import json_repair

cases = {r"x = 1\n": "x = 1\n", r"a\/b": "a/b", r"\ud835\udd04": "\U0001d504"}


def read(text, comma):
    return json_repair.loads(f'{{"file": "{text}"{comma}}}')["file"]


assert all(json.loads(f'"{text}"') == value for text, value in cases.items())
right = all(read(text, "") == value for text, value in cases.items())
print(f"without repair: {'right' if right else 'wrong'}, with repair", end=": ")
for text, value in list(cases.items())[:2]:
    print(f"{value!r} -> {read(text, ',')!r}", end=", ")
try:
    read(r"\ud835\udd04", ",").encode()
    print("surrogate pair -> text")
except UnicodeEncodeError as error:
    print("surrogate pair ->", type(error).__name__)
PY
)
echo "$output"
expected='without repair: right, with repair: '\''x = 1\n'\'' -> '\''x = 1'\'', '\''a/b'\'' ->'
expected+=' '\''a\\/b'\'', surrogate pair -> UnicodeEncodeError'
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
