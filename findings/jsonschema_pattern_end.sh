#!/usr/bin/env bash
# jsonschema 4.26.0 beside jsonschema-rs 0.61.2: `$` in a pattern also matches before a line break
# at the end of a text, and `\d` matches digits of all scripts, because Python's own expressions
# are used. JSON Schema names those of ECMAScript, where both are false. A value that a validator
# of another language refuses, and that int() or a name of a file does not expect, is valid here.
# Seen on 2026-11-29: line break at the end: yes no, Arabic digit: yes no, plain: yes yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'jsonschema==4.26.0' 'jsonschema-rs==0.61.2'
output=$("$folder/venv/bin/python" - <<'PY'
import jsonschema_rs
from jsonschema import Draft202012Validator

schema = {"type": "string", "pattern": r"^\d+$"}


def verdicts(value):
    taken = Draft202012Validator(schema).is_valid(value), jsonschema_rs.is_valid(schema, value)
    return " ".join("yes" if one else "no" for one in taken)


print("line break at the end:", verdicts("12\n"), end=", ")
print("Arabic digit:", verdicts("\u0663"), end=", ")
print("plain:", verdicts("12"))
PY
)
echo "$output"
expected="line break at the end: yes no, Arabic digit: yes no, plain: yes yes"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
