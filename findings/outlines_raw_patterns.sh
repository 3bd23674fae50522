#!/usr/bin/env bash
# outlines_core 0.2.14: a `pattern` stands between two quotes without a group and without the
# escapes of JSON. An alternative takes only one of the quotes, so `^a|b$` matches two texts that
# are no JSON and none of its two values. A class such as [^,] also takes a bare quote, so a model
# can write a text that no parser reads. The pattern with a group is right.
# Seen on 2026-11-29: ^a|b$: "a" no, "a yes; ^(a|b)$: "a" yes, "a no; ^[^,]+$: "x" yes, "x"y" yes
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


def takes(pattern, text, valid):
    schema = {"type": "string", "pattern": pattern}
    try:
        right = Draft202012Validator(schema).is_valid(json.loads(text))
    except json.JSONDecodeError:
        right = False
    assert right == valid
    expression = build_regex_from_schema(json.dumps(schema))
    return "yes" if re.fullmatch(expression, text) else "no"


for pattern in ("^a|b$", "^(a|b)$"):
    print(f'{pattern}: "a" {takes(pattern, chr(34) + "a" + chr(34), True)}', end=", ")
    print(f'"a {takes(pattern, chr(34) + "a", False)}', end="; ")
pattern = "^[^,]+$"
print(f'{pattern}: "x" {takes(pattern, chr(34) + "x" + chr(34), True)}', end=", ")
broken = '"x"y"'
print(f"{broken} {takes(pattern, broken, False)}")
PY
)
echo "$output"
expected='^a|b$: "a" no, "a yes; ^(a|b)$: "a" yes, "a no; ^[^,]+$: "x" yes, "x"y" yes'
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
