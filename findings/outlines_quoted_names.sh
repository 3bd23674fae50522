#!/usr/bin/env bash
# outlines_core 0.2.14: the name of a declared property enters the pattern without the escapes of
# JSON. A name with a quote, a backslash or a line break gets a pattern that matches no JSON text:
# the valid object is refused, and a text that no parser reads is taken. Values of an enum are
# escaped as they should be.
# Seen on 2026-11-29: valid texts of 3 names: no no no, broken texts: yes yes yes, enum: yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'outlines_core==0.2.14'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import re

from outlines_core import json_schema

NAMES = ('screen 5"', "C:\\new", "two\nlines")


def takes(schema, text):
    pattern = json_schema.build_regex_from_schema(json.dumps(schema))
    return "yes" if re.fullmatch(pattern, text) else "no"


def schema_of(name):
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}


valid = [takes(schema_of(name), json.dumps({name: 1})) for name in NAMES]
broken = [takes(schema_of(name), f'{{"{name}": 1}}') for name in NAMES]
value = takes({"enum": [NAMES[0]]}, json.dumps(NAMES[0]))
print(f"valid texts of {len(NAMES)} names:", *valid, end=", ")
print("broken texts:", *broken, end=", ")
print("enum:", value)
PY
)
echo "$output"
[ "$output" = "valid texts of 3 names: no no no, broken texts: yes yes yes, enum: yes" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
