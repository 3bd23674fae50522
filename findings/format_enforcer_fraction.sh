#!/usr/bin/env bash
# lm-format-enforcer 0.11.3: the parser of {"type": "number"} lets an exponent follow the decimal
# point at once. A text such as 1.e5 is complete to it, and JSON parsers refuse the text.
# Seen on 2026-11-29: 1.5e5 yes, 1. no, 1.e5 yes, json: JSONDecodeError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'lm-format-enforcer==0.11.3'
output=$("$folder/venv/bin/python" - <<'PY'
import json

from lmformatenforcer import JsonSchemaParser


def takes(text):
    parser = JsonSchemaParser({"type": "number"})
    for character in text:
        if character not in parser.get_allowed_characters():
            return "no"
        parser = parser.add_character(character)
    return "yes" if parser.can_end() else "no"


print(", ".join(f"{text} {takes(text)}" for text in ("1.5e5", "1.", "1.e5")), end=", json: ")
try:
    print(json.loads("1.e5"))
except ValueError as error:
    print(type(error).__name__)
PY
)
echo "$output"
[ "$output" = "1.5e5 yes, 1. no, 1.e5 yes, json: JSONDecodeError" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
