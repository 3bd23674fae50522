#!/usr/bin/env bash
# outlines_core 0.2.14: build_regex_from_schema leaves out constraints without an error or warning:
# minimum, maximum and multipleOf of numbers, uniqueItems of arrays, maxProperties of objects, and
# a required name that `properties` does not declare. Other unknown parts (`not`, `if`) are refused.
# Seen on 2026-11-28: all six invalid texts match, `not` raises ValueError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'outlines_core==0.2.14'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import re

from outlines_core import json_schema

INVALID = (
    ({"type": "integer", "minimum": 3}, "2"),
    ({"type": "number", "maximum": 3}, "3.5"),
    ({"type": "integer", "multipleOf": 5}, "7"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]"),
    ({"type": "object", "maxProperties": 1}, '{"a":1,"b":2}'),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}, "{}"),
)
taken = 0
for schema, text in INVALID:
    pattern = json_schema.build_regex_from_schema(json.dumps(schema))
    taken += re.fullmatch(pattern, text) is not None
try:
    json_schema.build_regex_from_schema(json.dumps({"not": {"type": "string"}}))
    refusal = "taken"
except ValueError as error:
    refusal = type(error).__name__
print(f"{taken} of {len(INVALID)} invalid texts match, not: {refusal}")
PY
)
echo "$output"
[ "$output" = "6 of 6 invalid texts match, not: ValueError" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
