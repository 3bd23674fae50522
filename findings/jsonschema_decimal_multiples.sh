#!/usr/bin/env bash
# jsonschema 4.26.0 beside jsonschema-rs 0.61.2 and fastjsonschema 2.22.3: a price of 19.99 is no
# multiple of 0.01 to jsonschema, because it divides floats. The others take it, and so does the
# grammar of llguidance 1.9.1, the last of the four verdicts. A gateway that checks arguments of
# tools with jsonschema refuses what the engine was told to write.
# Seen on 2026-11-29: 0.3 of 0.1: no yes yes yes, 19.99 of 0.01: no yes yes yes, 0.75 of 0.25: yes
# yes yes yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'jsonschema==4.26.0' 'jsonschema-rs==0.61.2' \
    'fastjsonschema==2.22.3' 'llguidance==1.9.1'
output=$("$folder/venv/bin/python" - <<'PY'
import json

import fastjsonschema
import jsonschema_rs
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def fast(schema, value):
    try:
        fastjsonschema.compile(schema)(value)
    except fastjsonschema.JsonSchemaValueException:
        return False
    return True


def grammar(schema, value):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(json.dumps(value))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def verdicts(value, step):
    schema = {"type": "number", "multipleOf": step}
    taken = [Draft202012Validator(schema).is_valid(value), jsonschema_rs.is_valid(schema, value)]
    taken += [fast(schema, value), grammar(schema, value)]
    return f"{value} of {step}: " + " ".join("yes" if one else "no" for one in taken)


print(verdicts(0.3, 0.1), verdicts(19.99, 0.01), verdicts(0.75, 0.25), sep=", ")
PY
)
echo "$output"
expected="0.3 of 0.1: no yes yes yes, 19.99 of 0.01: no yes yes yes, 0.75 of 0.25: yes yes yes"
expected+=" yes"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
