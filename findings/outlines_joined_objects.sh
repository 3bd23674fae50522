#!/usr/bin/env bash
# outlines_core 0.2.14: `allOf` is the texts of its parts one after the other. Two objects that an
# OpenAPI file joins by `allOf` give a pattern that matches two JSON texts in a row, and not the
# object with the members of both. No error tells it.
# Seen on 2026-11-29: {"a": 1, "b": 2}: no, {"a": 1}{"b": 2}: yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'outlines-core==0.2.14' 'jsonschema==4.26.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import re

from jsonschema import Draft202012Validator
from outlines_core.json_schema import build_regex_from_schema


def part(name):
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}


schema = {"allOf": [part("a"), part("b")]}
expression = build_regex_from_schema(json.dumps(schema))
texts = '{"a": 1, "b": 2}', '{"a": 1}{"b": 2}'
assert Draft202012Validator(schema).is_valid(json.loads(texts[0]))
print(", ".join(f"{t}: {'yes' if re.fullmatch(expression, t) else 'no'}" for t in texts))
PY
)
echo "$output"
expected='{"a": 1, "b": 2}: no, {"a": 1}{"b": 2}: yes'
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
