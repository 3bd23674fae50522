#!/usr/bin/env bash
# llguidance 1.9.1: a number below a decimal bound cannot be produced if its digits begin the digits
# of the bound. With a maximum of 0.75 the text 0.7 is refused, and 0.70, 0.6 and 0.71 are taken.
# Seen on 2026-11-29: maximum 0.75: 0.6 yes, 0.7 no, 0.70 yes, 0.71 yes, 0.76 no
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'llguidance==1.9.1'
output=$("$folder/venv/bin/python" - <<'PY'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
schema = json.dumps({"type": "number", "minimum": 0, "maximum": 0.75})


def takes(text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    return "yes" if taken else "no"


texts = ("0.6", "0.7", "0.70", "0.71", "0.76")
print("maximum 0.75:", ", ".join(f"{text} {takes(text)}" for text in texts))
PY
)
echo "$output"
[ "$output" = "maximum 0.75: 0.6 yes, 0.7 no, 0.70 yes, 0.71 yes, 0.76 no" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
