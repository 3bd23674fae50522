#!/usr/bin/env bash
# openai-harmony 0.0.8: a final answer whose header says that it is JSON (`<|constrain|>json`, as
# gpt-oss writes it for an answer by a schema) is parsed with the recipient "<|constrain|>json".
# Other headers keep that word in content_type. A server that takes each message with a recipient
# for a call of a tool gives the user an empty answer and a call of an unknown tool.
# Seen on 2026-11-29: final: recipient <|constrain|>json, content_type None; tool: recipient
# functions.f, content_type <|constrain|>json
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'openai-harmony==0.0.8' 'pydantic==2.14.4'
npm install --silent --no-fund --no-audit --prefix "$folder" \
    'js-tiktoken@1.0.21' >/dev/null
node - "$folder" <<'JS'
// The ranks of js-tiktoken as the file that tiktoken and harmony read, which checks its digest.
const { writeFileSync } = require("fs");
const folder = process.argv[2];
const ranks = require(`${folder}/node_modules/js-tiktoken/dist/ranks/o200k_base.cjs`);
const lines = [];
for (const line of (ranks.default ?? ranks).bpe_ranks.split("\n").filter(Boolean)) {
  const [, first, ...tokens] = line.split(" ");
  tokens.forEach((token, index) => lines.push(`${token} ${Number(first) + index}\n`));
}
writeFileSync(`${folder}/o200k_base.tiktoken`, lines.join(""));
JS
export TIKTOKEN_ENCODINGS_BASE=$folder
output=$("$folder/venv/bin/python" - <<'PY'
from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def header(text):
    tokens = encoding.encode(text, allowed_special="all")
    (message,) = encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
    assert message.content[0].text == "{}"
    return f"recipient {message.recipient}, content_type {message.content_type}"


constrained = "<|constrain|>json<|message|>{}"
print("final:", header(f"<|channel|>final {constrained}<|return|>"), end="; ")
print("tool:", header(f"<|channel|>commentary to=functions.f {constrained}<|call|>"))
PY
)
echo "$output"
expected="final: recipient <|constrain|>json, content_type None; tool: recipient functions.f,"
expected+=" content_type <|constrain|>json"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
