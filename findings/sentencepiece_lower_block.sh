#!/usr/bin/env bash
# sentencepiece 0.2.3 with the tokenizer of Mistral 7B (in mistral-common 1.13.1): the character
# U+2581 of a text becomes a space, because the model's format uses it as the sign for spaces. Bars
# that a model draws with it lose their lowest step, and a text with it has the tokens of another
# text. The tekken tokenizer of the same package keeps it.
# Seen on 2026-11-30: sentencepiece: U+2581 U+2582 -> U+0020 U+2582, tekken: the same text; tokens
# of "a b" and of "a", U+2581, "b" equal
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'sentencepiece==0.2.3' 'mistral-common==1.13.1'
output=$("$folder/venv/bin/python" -W ignore - <<'PY'
from pathlib import Path

import mistral_common
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from sentencepiece import SentencePieceProcessor

folder = Path(mistral_common.__file__).parent / "data"
one = SentencePieceProcessor(model_file=str(folder / "tokenizer.model.v1"))
two = Tekkenizer.from_file(folder / "tekken_240911.json")
bars = "\u2581\u2582"


def names(text):
    return " ".join(f"U+{ord(character):04X}" for character in text)


print(f"sentencepiece: {names(bars)} -> {names(one.decode(one.encode(bars)))}", end=", ")
same = two.decode(two.encode(bars, bos=False, eos=False)) == bars
print("tekken:", "the same text" if same else "another text", end="; ")
print("tokens", "equal" if one.encode("a b") == one.encode("a\u2581b") else "differ")
PY
)
echo "$output"
expected="sentencepiece: U+2581 U+2582 -> U+0020 U+2582, tekken: the same text; tokens equal"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
