#!/usr/bin/env bash
# @huggingface/jinja 0.5.11 (npm) beside Jinja2 3.1.6: chat templates mean other things where they
# compare lists, count letters or take remainders. `tools == []` is never true, the length of a
# text counts halves of characters beyond U+FFFF, and -1 % 2 is -1. None and True in a text are
# empty and "true". A prompt of the same template differs from the engine's.
# Seen on 2026-11-29: Jinja2: no tools,1,1,[None True]; @huggingface/jinja: tools,2,-1,[ true]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'jinja2==3.1.6'
npm install --silent --no-fund --no-audit --prefix "$folder" \
    '@huggingface/jinja@0.5.11' >/dev/null
output=$("$folder/venv/bin/python" - <<'PY'
import json
import os
import subprocess
import sys

from jinja2.sandbox import ImmutableSandboxedEnvironment

template = (
    "{% if tools == [] %}no tools{% else %}tools{% endif %},{{ text|length }},{{ -1 % 2 }},"
    "[{{ none }} {{ true }}]"
)
context = {"tools": [], "text": "\U0001d504"}
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
print("Jinja2:", environment.from_string(template).render(**context), end="; ")
program = (
    'import { Template } from "@huggingface/jinja";'
    f"process.stdout.write(new Template({json.dumps(template)}).render({json.dumps(context)}))"
)
command = ["node", "--input-type=module", "-e", program]
folder = os.path.dirname(sys.prefix)
shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
print("@huggingface/jinja:", shown)
PY
)
echo "$output"
expected="Jinja2: no tools,1,1,[None True]; @huggingface/jinja: tools,2,-1,[ true]"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
