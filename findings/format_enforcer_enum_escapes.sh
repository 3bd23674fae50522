#!/usr/bin/env bash
# lm-format-enforcer 0.11.3: a value of a string enum is compared with the characters of the JSON
# text, without its escapes. A value with a line break or a tab cannot be produced as JSON, and the
# text with the raw character, which JSON forbids inside a string, is taken. A quote ends a value,
# so a shorter value that the enum lacks is taken. Free strings are right.
# Seen on 2026-11-29: line break: escaped no, raw yes; tab: escaped no, raw yes; quote: shorter yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'lm-format-enforcer==0.11.3'
output=$("$folder/venv/bin/python" - <<'PY'
import json

from lmformatenforcer import JsonSchemaParser

VALUES = {"line break": "first\nsecond", "tab": "key\tvalue"}


def takes(schema, text):
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return "no"
        parser = parser.add_character(character)
    return "yes" if parser.can_end() else "no"


for name, value in VALUES.items():
    escaped, raw = (takes({"enum": [value]}, text) for text in (json.dumps(value), f'"{value}"'))
    print(f"{name}: escaped {escaped}, raw {raw}", end="; ")
free = {"type": "string"}
assert (takes(free, '"a\\nb"'), takes(free, '"a\nb"')) == ("yes", "no")
print("quote: shorter", takes({"enum": ['screen 5"']}, '"screen 5"'))
PY
)
echo "$output"
expected="line break: escaped no, raw yes; tab: escaped no, raw yes; quote: shorter yes"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
