#!/usr/bin/env bash
# llguidance 1.9.1: names of object members are compared as JSON texts, not as strings. A declared
# name whose letter is written as an escape counts as an additional member, so a value of the wrong
# type is taken. A JSON parser reads the same text as the declared member.
# Seen on 2026-11-29: plain name: no, escaped name: yes, jsonschema: False False
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
schema = {"type": "object", "properties": {"age": {"type": "integer"}}}


def takes(text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    return "yes" if taken else "no"


plain, escaped = '{"age":"old"}', '{"\\u0061ge":"old"}'
assert json.loads(plain) == json.loads(escaped)
valid = [Draft202012Validator(schema).is_valid(json.loads(text)) for text in (plain, escaped)]
print(f"plain name: {takes(plain)}, escaped name: {takes(escaped)}, jsonschema:", *valid)
PY
)
echo "$output"
[ "$output" = "plain name: no, escaped name: yes, jsonschema: False False" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
