#!/usr/bin/env bash
# PyYAML 6.0.4 beside ruamel.yaml 0.19.1, yaml 2.9.1 and js-yaml 5.5.0 (npm): PyYAML writes the text
# 1234e56 without quotes, because it knows only exponents with a point and a sign. YAML 1.2, and the
# parser of Kubernetes, read a number. 1.9 of 100 shortened commits of 7 digits have this form. A
# revision of a model, an image's tag or a key that comes from one makes a manifest with a number in
# place of a text, which Kubernetes refuses for an environment variable. A text of 0o17 becomes 15,
# and 09 becomes 9. PyYAML itself reads them as texts, so a test with it passes.
# Seen on 2026-11-30: PyYAML writes 1234e56, 0o17, 09, v1; ruamel float 1.234e+59, int 15, int 9,
# str v1; yaml number 1.234e+59, number 15, number 9, string v1; js-yaml number 1.234e+59, number
# 15, number 9, string v1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'PyYAML==6.0.4' 'ruamel.yaml==0.19.1'
npm install --silent --no-fund --no-audit --prefix "$folder" 'yaml@2.9.1' 'js-yaml@5.5.0' \
    >/dev/null
cat >"$folder/read.mjs" <<'JS'
import YAML from "yaml";
import { load } from "js-yaml";

for (const parse of [YAML.parse, load]) {
  console.log(parse(process.argv[2]).map((value) => `${typeof value} ${value}`).join(", "));
}
JS
output=$("$folder/venv/bin/python" - <<'PY'
import subprocess
import sys

import yaml
from ruamel.yaml import YAML

texts = ["1234e56", "0o17", "09", "v1"]
written = yaml.safe_dump(texts)
assert yaml.safe_load(written) == texts
command = ["node", f"{sys.prefix}/../read.mjs", written]
node = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
print("PyYAML writes", ", ".join(written.replace("- ", "").split()), end="; ")
values = YAML(typ="safe").load(written)
print("ruamel", ", ".join(f"{type(value).__name__} {value}" for value in values), end="; ")
print(f"yaml {node[0]}; js-yaml {node[1]}")
PY
)
echo "$output"
expected="PyYAML writes 1234e56, 0o17, 09, v1; ruamel float 1.234e+59, int 15, int 9, str v1; "
expected+="yaml number 1.234e+59, number 15, number 9, string v1; js-yaml number 1.234e+59, "
expected+="number 15, number 9, string v1"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
