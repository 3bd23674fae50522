#!/usr/bin/env bash
# transformers 5.24.0 beside 4.57.6: an infinite number in config.json has two forms, and neither is
# read everywhere. 4.57.6 writes the word Infinity, which is no JSON: orjson 3.13.0, msgspec 0.23.0
# and JSON.parse of Node refuse the whole file, with all sizes in it. 5.24.0 writes an object in its
# place, which is JSON, but 4.57.6 and every other reader take it for an object. Mamba2 models have
# such a number as the upper limit of time_step_limit, so each of their checkpoints is concerned.
# Seen on 2026-11-30: saved by 4.57.6: json yes orjson no msgspec no Node no, 4.57.6 reads inf,
# 5.24.0 reads inf; saved by 5.24.0: json yes orjson yes msgspec yes Node yes, 4.57.6 reads
# {'__float__': 'Infinity'}, 5.24.0 reads inf
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.24.0 4.57.6; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "transformers==$version" 'Jinja2==3.1.6'
done
export TRANSFORMERS_VERBOSITY=error
"$folder/5.24.0/bin/pip" install --quiet 'orjson==3.13.0' 'msgspec==0.23.0'
cat >"$folder/save.py" <<'PY'
import sys

from transformers import Mamba2Config

Mamba2Config().save_pretrained(sys.argv[1])
PY
cat >"$folder/read.py" <<'PY'
import sys

from transformers import AutoConfig

print(AutoConfig.from_pretrained(sys.argv[1]).time_step_limit[1])
PY
cat >"$folder/parse.py" <<'PY'
import json
import subprocess
import sys

import msgspec
import orjson

path = f"{sys.argv[1]}/config.json"
program = f"JSON.parse(require('fs').readFileSync({json.dumps(path)}))"


def node(data):
    subprocess.run(["node", "-e", program], check=True, capture_output=True)


def is_read(parse):
    try:
        parse(open(path, "rb").read())
    except (ValueError, subprocess.CalledProcessError):
        return "no"
    return "yes"


parsers = {"json": json.loads, "orjson": orjson.loads, "msgspec": msgspec.json.decode, "Node": node}
print(" ".join(f"{name} {is_read(parse)}" for name, parse in parsers.items()))
PY
output=""
for version in 4.57.6 5.24.0; do
    saved="$folder/saved-$version"
    "$folder/$version/bin/python" "$folder/save.py" "$saved" 2>/dev/null
    output+="saved by $version: $("$folder/5.24.0/bin/python" "$folder/parse.py" "$saved"), "
    output+="4.57.6 reads $("$folder/4.57.6/bin/python" "$folder/read.py" "$saved" 2>/dev/null), "
    output+="5.24.0 reads $("$folder/5.24.0/bin/python" "$folder/read.py" "$saved" 2>/dev/null); "
done
output=${output%; }
echo "$output"
expected="saved by 4.57.6: json yes orjson no msgspec no Node no, 4.57.6 reads inf, 5.24.0 "
expected+="reads inf; saved by 5.24.0: json yes orjson yes msgspec yes Node yes, 4.57.6 reads "
expected+="{'__float__': 'Infinity'}, 5.24.0 reads inf"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
