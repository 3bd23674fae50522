#!/usr/bin/env bash
# @huggingface/tokenizers 0.2.0 (npm) beside tokenizers 0.23.3: a tokenizer.json that cuts texts by
# `Split` with "invert": true loses text in npm. The pieces between the matches are dropped for
# every behavior, though only `Removed` says so. A prompt of 34 bytes has 3 tokens in place of 34:
# its digits are left, its words are gone. Without invert, both agree. A browser or an edge function
# that counts, cuts or embeds with it works on another prompt than the engine, without an error.
# Seen on 2026-11-30: plain: isolated 34 34; inverted: isolated 34 3, merged_with_previous 34 3,
# merged_with_next 34 3, contiguous 34 3, removed 3 3
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

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

folder = f"{sys.prefix}/.."
text = "The model has 96 layers and 8 GPUs"
vocabulary = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}


def counts(behavior, invert):
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior, invert=invert),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    path = f"{folder}/tokenizer.json"
    tokenizer.save(path)
    command = ["node", f"{folder}/count.mjs", path, text]
    node = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return f"{len(tokenizer.encode(text).ids)} {node}"


behaviors = "isolated", "merged_with_previous", "merged_with_next", "contiguous", "removed"
words = [f"{behavior} {counts(behavior, True)}" for behavior in behaviors]
print(f"plain: isolated {counts('isolated', False)}; inverted:", ", ".join(words))
PY
)
echo "$output"
expected="plain: isolated 34 34; inverted: isolated 34 3, merged_with_previous 34 3, "
expected+="merged_with_next 34 3, contiguous 34 3, removed 3 3"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
