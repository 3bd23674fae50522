#!/usr/bin/env bash
# transformers 5.24.0 beside 4.57.6: a checkpoint that the newer one saves has `rope_parameters` in
# config.json, and no `rope_theta` or `rope_scaling`. The older one, as engines before the change
# bring it, reads such a file without an error or warning: the base of the rotary positions is 10000
# again, and the stretching (YaRN) is off. A base of 1000000 was trained, so the slowest pair of a
# head of 128 turns about 90 times too fast, and a fine-tuned model speaks nonsense, sooner the
# longer its prompt. The newer one reads files of the older one.
# Seen on 2026-11-30: saved by 5: read by 5: 1000000 yarn, read by 4: 10000 None; saved by 4: read
# by 5: 1000000 yarn, read by 4: 1000000 yarn
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.24.0 4.57.6; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "transformers==$version" 'Jinja2==3.1.6'
done
export TRANSFORMERS_VERBOSITY=error
cat >"$folder/base.py" <<'PY'
import sys

import transformers
from transformers import AutoConfig, LlamaConfig

folder, action = sys.argv[1:]
stretch = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
if action == "save":
    fields = {"rope_theta": 1e6, "rope_scaling": stretch}
    if transformers.__version__.startswith("5"):
        fields = {"rope_parameters": stretch | {"rope_theta": 1e6}}
    LlamaConfig(max_position_embeddings=32768, **fields).save_pretrained(folder)
else:
    config = AutoConfig.from_pretrained(folder)
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = config.rope_scaling or {}
    if not transformers.__version__.startswith("5"):
        rope = {"rope_theta": config.rope_theta}
    print(int(rope["rope_theta"]), scaling.get("rope_type"))
PY
for version in 5.24.0 4.57.6; do
    "$folder/$version/bin/python" "$folder/base.py" "$folder/saved-$version" save 2>/dev/null
done
function read_by { "$folder/$1/bin/python" "$folder/base.py" "$folder/saved-$2" read 2>/dev/null; }
output="saved by 5: read by 5: $(read_by 5.24.0 5.24.0), read by 4: $(read_by 4.57.6 5.24.0)"
output+="; saved by 4: read by 5: $(read_by 5.24.0 4.57.6), read by 4: $(read_by 4.57.6 4.57.6)"
echo "$output"
expected="saved by 5: read by 5: 1000000 yarn, read by 4: 10000 None; saved by 4: read by 5: "
expected+="1000000 yarn, read by 4: 1000000 yarn"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
