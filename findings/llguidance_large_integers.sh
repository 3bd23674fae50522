#!/usr/bin/env bash
# llguidance 1.9.1: integers of a schema beyond 2**53 are rounded to a double. A constant such as an
# identifier of 64 bits cannot be produced, and the rounded number, which the schema forbids, can.
# Bounds are rounded too: a minimum of 2**53 + 1 lets 2**53 pass.
# Seen on 2026-11-29: const 1234567890123456789: no, 1234567890123456768: yes, below minimum: yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'llguidance==1.9.1' 'jsonschema==4.26.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json

from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def takes(schema, text, valid):
    assert Draft202012Validator(schema).is_valid(json.loads(text)) == valid
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    return "yes" if taken else "no"


identifier = 1234567890123456789
rounded = str(int(float(identifier)))
print(f"const {identifier}: {takes({'const': identifier}, str(identifier), True)}", end=", ")
print(f"{rounded}: {takes({'const': identifier}, rounded, False)}", end=", ")
least = {"type": "integer", "minimum": 2**53 + 1}
print(f"below minimum: {takes(least, str(2**53), False)}")
PY
)
echo "$output"
expected="const 1234567890123456789: no, 1234567890123456768: yes, below minimum: yes"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
