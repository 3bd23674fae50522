#!/usr/bin/env bash
# tokenizers 0.23.3: DecodeStream keeps back a text that ends in U+FFFD, and has no method to end
# the stream. That character in an answer is taken for half of another one, so the last piece of an
# answer that ends with it never comes. The same holds for the bytes that the token limit leaves.
# `decode` has both. A server that streams with this class sends less than without streaming.
# Seen on 2026-11-30: plain: ab of ab, U+FFFD at the end: a of a?, U+FFFD inside: a?b of a?b, half
# a character: a of a?
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'tokenizers==0.23.3'
output=$("$folder/venv/bin/python" - <<'PY'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

letters = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
tokenizer = Tokenizer(models.BPE(letters, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()


def texts(tokens):
    stream = decoders.DecodeStream(skip_special_tokens=True)
    pieces = "".join(filter(None, (stream.step(tokenizer, token) for token in tokens)))
    whole = tokenizer.decode(tokens)
    return f"{pieces} of {whole}".replace("\ufffd", "?")


def tokens(text):
    return tokenizer.encode(text).ids


print("plain:", texts(tokens("ab")), end=", ")
print("U+FFFD at the end:", texts(tokens("a\ufffd")), end=", ")
print("U+FFFD inside:", texts(tokens("a\ufffdb")), end=", ")
print("half a character:", texts(tokens("a\U0001d53c")[:-2]))
PY
)
echo "$output"
expected="plain: ab of ab, U+FFFD at the end: a of a?, U+FFFD inside: a?b of a?b"
[ "$output" = "$expected, half a character: a of a?" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
