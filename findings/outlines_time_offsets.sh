#!/usr/bin/env bash
# outlines_core 0.2.14: the formats `time` and `date-time` refuse every offset but Z, and take a
# text without an offset. JSON Schema refers to RFC 3339 (5.6), where the offset is a must and
# +05:30 is one. A model cannot write the local time that a schema asks for, and what it writes
# without an offset fails in validators that check formats. Days such as 2026-02-31 pass, too.
# Seen on 2026-11-29: Z: yes, +05:30: no, no offset: yes, 31 February: yes; jsonschema-rs: yes yes
# no no
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'outlines-core==0.2.14' 'jsonschema-rs==0.61.2'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import re

import jsonschema_rs
from outlines_core.json_schema import build_regex_from_schema

schema = {"type": "string", "format": "date-time"}
expression = build_regex_from_schema(json.dumps(schema))
values = {
    "Z": "2026-01-31T12:00:00Z",
    "+05:30": "2026-01-31T12:00:00+05:30",
    "no offset": "2026-01-31T12:00:00",
    "31 February": "2026-02-31T12:00:00Z",
}


def word(taken):
    return "yes" if taken else "no"


taken = {name: word(re.fullmatch(expression, f'"{text}"')) for name, text in values.items()}
print(", ".join(f"{name}: {value}" for name, value in taken.items()), end="; jsonschema-rs: ")
validator = jsonschema_rs.validator_for(schema, validate_formats=True)
print(" ".join(word(validator.is_valid(text)) for text in values.values()))
PY
)
echo "$output"
expected="Z: yes, +05:30: no, no offset: yes, 31 February: yes; jsonschema-rs: yes yes no no"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
