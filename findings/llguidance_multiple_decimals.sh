#!/usr/bin/env bash
# llguidance 1.9.1: with `multipleOf` 0.25 a number has to have either no decimals or all of the
# step. The text 0.5, which json.dumps and other writers make of that number, is refused, and so
# is 1.0. A model has to write 0.50. With a step of 0.05 the texts 0.5 and 0.50 are taken.
# Seen on 2026-11-29: step 0.25: 0.5 no, 0.50 yes, 1.0 no, 1 yes; step 0.05: 0.5 yes, 0.50 yes,
# 1.0 yes, 1 yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'llguidance==1.9.1'
output=$("$folder/venv/bin/python" - <<'PY'
import json
from decimal import Decimal

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def takes(step, text):
    assert Decimal(text) % Decimal(step) == 0
    schema = f'{{"type": "number", "multipleOf": {step}}}'
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    return "yes" if taken else "no"


assert json.dumps(0.5) == "0.5" and json.dumps(1.0) == "1.0"
texts = "0.5", "0.50", "1.0", "1"
lines = (
    f"step {step}: " + ", ".join(f"{text} {takes(step, text)}" for text in texts)
    for step in ("0.25", "0.05")
)
print("; ".join(lines))
PY
)
echo "$output"
expected="step 0.25: 0.5 no, 0.50 yes, 1.0 no, 1 yes; step 0.05: 0.5 yes, 0.50 yes, 1.0 yes, 1"
expected+=" yes"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
