#!/usr/bin/env bash
# outlines_core 0.2.14: the pattern of {"type": "number"} wants a sign in every exponent, so 1e5
# and 1.5E5 are no numbers to it, although JSON has them; 1e+5 and 1.5e-7 are.
# Seen on 2026-11-28: 1e5 no, 1.5E5 no, 1e+5 yes, 1.5e-7 yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'outlines_core==0.2.14'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import re

from outlines_core import json_schema

pattern = json_schema.build_regex_from_schema(json.dumps({"type": "number"}))
texts = ("1e5", "1.5E5", "1e+5", "1.5e-7")
assert all(isinstance(json.loads(text), float) for text in texts)
print(", ".join(f"{text} {'yes' if re.fullmatch(pattern, text) else 'no'}" for text in texts))
PY
)
echo "$output"
[ "$output" = "1e5 no, 1.5E5 no, 1e+5 yes, 1.5e-7 yes" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
