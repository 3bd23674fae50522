#!/usr/bin/env bash
# tokenizers 0.23.3 beside transformers 5.24.0: a tokenizer.json may hold the truncation and
# padding of its training, and files on the hub do. tokenizers applies them to each text without a
# word, transformers does not. A gateway that counts tokens with the first one never finds a
# prompt longer than that limit, and counts short ones too high.
# Seen on 2026-11-29: long text: tokenizers 8, transformers 100; short text: tokenizers 4,
# transformers 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'tokenizers==0.23.3' 'transformers==5.24.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import os
import pathlib
import sys
import tempfile

os.environ["TRANSFORMERS_VERBOSITY"] = "critical"

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

folder = pathlib.Path(tempfile.mkdtemp(dir=pathlib.Path(sys.prefix).parent))
letters = {letter: index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
source = Tokenizer(models.BPE(letters, []))
source.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
source.decoder = decoders.ByteLevel()
source.enable_truncation(8)
source.enable_padding(length=4)
source.save(str(folder / "tokenizer.json"))
kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
(folder / "tokenizer_config.json").write_text(json.dumps(kind))
one = Tokenizer.from_file(str(folder / "tokenizer.json"))
two = AutoTokenizer.from_pretrained(folder)


def counts(text):
    return f"tokenizers {len(one.encode(text).ids)}, transformers {len(two.encode(text))}"


print(f"long text: {counts('a' * 100)}; short text: {counts('a')}")
PY
)
echo "$output"
expected="long text: tokenizers 8, transformers 100; short text: tokenizers 4, transformers 1"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
