#!/usr/bin/env bash
# transformers 5.24.0 beside 4.57.6: `apply_chat_template` gives a dictionary of two members where
# it gave the list of tokens. len() of the result, by which programs count the tokens of a prompt,
# is 2 for every prompt, without an error. A limit of the context or a bill that relies on it never
# sees a long prompt: 2 in place of 1001 here. A tokenizer that 5.24.0 saves cannot be loaded by
# 4.57.6, because its class has a name of the new version.
# Seen on 2026-11-30: saved by 4: 4 counts 1001, 5 counts 2; saved by 5: 5 counts 2, 4 counts
# ValueError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.24.0 4.57.6; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "transformers==$version" 'Jinja2==3.1.6'
done
export TRANSFORMERS_VERBOSITY=error
cat >"$folder/count.py" <<'PY'
import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

folder, action = sys.argv[1:]
if action == "save":
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "user": 1, "a": 2}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    fast.chat_template = "{% for one in messages %}{{ one.role }} {{ one.content }}{% endfor %}"
    fast.save_pretrained(folder)
try:
    fast = AutoTokenizer.from_pretrained(folder)
except ValueError as error:
    assert "TokenizersBackend" in str(error), error
    print(type(error).__name__)
else:
    messages = [{"role": "user", "content": "a " * 1000}]
    print(len(fast.apply_chat_template(messages)))
PY
function count { "$folder/$1/bin/python" "$folder/count.py" "$folder/saved-$2" "$3" 2>/dev/null; }
output="saved by 4: 4 counts $(count 4.57.6 4.57.6 save), 5 counts $(count 5.24.0 4.57.6 read)"
output+="; saved by 5: 5 counts $(count 5.24.0 5.24.0 save), 4 counts $(count 4.57.6 5.24.0 read)"
echo "$output"
expected="saved by 4: 4 counts 1001, 5 counts 2; saved by 5: 5 counts 2, 4 counts ValueError"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
