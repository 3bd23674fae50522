#!/usr/bin/env bash
# lm-format-enforcer 0.11.3: an array of `maxItems` 0 may have any number of items, because the
# limit 0 is taken for none; `items` false is ignored as well, and so are the types of
# `prefixItems`. A limit of 1 holds. A parameter that a tool wants to stay empty gets values.
# Seen on 2026-11-29: maxItems 0: [] yes, [1] yes; maxItems 1: [1] yes, [1,2] no; prefixItems:
# ["a"] yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'lm-format-enforcer==0.11.3' 'jsonschema==4.26.0' \
    'numpy==2.4.6'
output=$("$folder/venv/bin/python" - <<'PY'
import json

from jsonschema import Draft202012Validator
from lmformatenforcer import JsonSchemaParser


def takes(schema, text, valid):
    assert Draft202012Validator(schema).is_valid(json.loads(text)) == valid
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return "no"
        parser = parser.add_character(character)
    return "yes" if parser.can_end() else "no"


numbers = {"type": "array", "items": {"type": "integer"}}
none, one = numbers | {"maxItems": 0}, numbers | {"maxItems": 1}
print(f"maxItems 0: [] {takes(none, '[]', True)}, [1] {takes(none, '[1]', False)}", end="; ")
print(f"maxItems 1: [1] {takes(one, '[1]', True)}, [1,2] {takes(one, '[1,2]', False)}", end="; ")
pair = {"type": "array", "prefixItems": [{"type": "integer"}], "items": False}
print(f'prefixItems: ["a"] {takes(pair, json.dumps(["a"]), False)}')
PY
)
echo "$output"
expected='maxItems 0: [] yes, [1] yes; maxItems 1: [1] yes, [1,2] no; prefixItems: ["a"] yes'
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
