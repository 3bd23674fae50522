#!/usr/bin/env bash
# @huggingface/tokenizers 0.2.0 (npm) beside tokenizers 0.23.3: a Unigram model with `byte_fallback`
# has no bytes in npm. A character that the vocabulary lacks is an unknown token, and a row of them
# is one, where tokenizers writes a token for each byte. A text of 100 unknown letters counts 2 in
# place of 101, so a prompt that is far too long passes a check in a browser, and its text cannot be
# decoded. With a BPE model, both agree. `single_word` of added tokens is ignored as well: a name
# inside a longer word is cut out of it.
# Seen on 2026-11-30: Unigram 101 2, BPE 101 101, word aa in aaaaa 6 4
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'tokenizers==0.23.3'
npm install --silent --no-fund --no-audit --prefix "$folder" '@huggingface/tokenizers@0.2.0' \
    >/dev/null
cat >"$folder/count.mjs" <<'JS'
import { Tokenizer } from "@huggingface/tokenizers";
import fs from "node:fs";

const [path, text] = process.argv.slice(2);
const tokenizer = new Tokenizer(JSON.parse(fs.readFileSync(path)), {});
console.log(tokenizer.encode(text).ids.length);
JS
output=$("$folder/venv/bin/python" - <<'PY'
import subprocess
import sys

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

folder = f"{sys.prefix}/.."
bytes_of_all = [f"<0x{number:02X}>" for number in range(256)]
pieces = ["<unk>", "\u2581", "a", *bytes_of_all]


def counts(model, text):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_tokens([AddedToken("aa", single_word=True, normalized=False)])
    path = f"{folder}/tokenizer.json"
    tokenizer.save(path)
    command = ["node", f"{folder}/count.mjs", path, text]
    node = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return f"{len(tokenizer.encode(text).ids)} {node}"


unigram = models.Unigram([(piece, -1.0) for piece in pieces], 0, True)
vocabulary = {piece: number for number, piece in enumerate(pieces)}
bpe = models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>")
print("Unigram", counts(unigram, "x" * 100), end=", ")
print("BPE", counts(bpe, "x" * 100), end=", ")
print("word aa in aaaaa", counts(bpe, "aaaaa"))
PY
)
echo "$output"
expected="Unigram 101 2, BPE 101 101, word aa in aaaaa 6 4"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
