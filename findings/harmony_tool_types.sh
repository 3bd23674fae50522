#!/usr/bin/env bash
# openai-harmony 0.0.8: the types that a tool's parameters get in the prompt of gpt-oss say
# something else than the schema. Lists of an enum become a word or a list of the last word, since
# brackets are missing. `anyOf` and `$ref`, which pydantic writes for optional and for nested
# values, and `const` become `any`, and an enum of numbers any number. The second line of a
# description stands outside its comment.
# Seen on 2026-11-29: list of a and b: "a" | "b"[], optional integer: any, nested: any, const:
# any, enum 1 and 2: number, description: // one two
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
from openai_harmony import (
    Conversation,
    DeveloperContent,
    HarmonyEncodingName,
    Message,
    Role,
    ToolDescription,
    load_harmony_encoding,
)

encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
properties = {
    "list": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
    "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "nested": {"$ref": "#/$defs/Place"},
    "constant": {"const": "x"},
    "number": {"type": "integer", "enum": [1, 2]},
    "described": {"type": "string", "description": "one\ntwo"},
}
place = {"type": "object", "properties": {"city": {"type": "string"}}}
schema = {"type": "object", "properties": properties, "required": list(properties)}
tool = ToolDescription.new("f", "Sample.", parameters=schema | {"$defs": {"Place": place}})
content = DeveloperContent.new().with_function_tools([tool])
message = Message.from_role_and_content(Role.DEVELOPER, content)
prompt = encoding.decode(encoding.render_conversation(Conversation.from_messages([message])))
lines = prompt.splitlines()
types = dict(line.rstrip(",").split(": ", 1) for line in lines if line.endswith(","))
described = lines.index("described: string,")
print(f"list of a and b: {types['list']}, optional integer: {types['optional']}", end=", ")
print(f"nested: {types['nested']}, const: {types['constant']}", end=", ")
print(f"enum 1 and 2: {types['number']}", end=", ")
print("description:", " ".join(lines[described - 2 : described]))
PY
)
echo "$output"
expected='list of a and b: "a" | "b"[], optional integer: any, nested: any, const: any, enum 1'
expected+=' and 2: number, description: // one two'
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
