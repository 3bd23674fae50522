#!/usr/bin/env bash
# orjson 3.13.0: an integer beyond 64 bits is read as a float, without an error, so a gateway that
# reads and writes a body changes the number. json, msgspec 0.23.0 and pydantic-core 2.50.5 keep
# all digits. A number beyond the range of floats, which JSON allows as well, is an error here and
# in msgspec, and infinity in the other two, which write it as a word that is no JSON.
# Seen on 2026-11-29: 18446744073709551617: orjson 1.8446744073709552e+19, others equal; 1e400:
# orjson error, msgspec error, json Infinity, pydantic-core Infinity
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'orjson==3.13.0' 'msgspec==0.23.0' \
    'pydantic-core==2.50.5'
output=$("$folder/venv/bin/python" - <<'PY'
import json

import msgspec
import orjson
import pydantic_core


def rewritten(read, write, text):
    try:
        result = write(read(text))
    except (ValueError, msgspec.DecodeError):
        return "error"
    return result if isinstance(result, str) else result.decode()


libraries = {
    "orjson": (orjson.loads, orjson.dumps),
    "msgspec": (msgspec.json.decode, msgspec.json.encode),
    "json": (json.loads, json.dumps),
    "pydantic-core": (pydantic_core.from_json, pydantic_core.to_json),
}
large = str(2**64 + 1)
results = {name: rewritten(*functions, large) for name, functions in libraries.items()}
others = "equal" if {v for k, v in results.items() if k != "orjson"} == {large} else results
print(f"{large}: orjson {results['orjson']}, others {others}", end="; ")
print("1e400:", ", ".join(f"{k} {rewritten(*f, '1e400')}" for k, f in libraries.items()))
PY
)
echo "$output"
expected="18446744073709551617: orjson 1.8446744073709552e+19, others equal; 1e400: orjson"
expected+=" error, msgspec error, json Infinity, pydantic-core Infinity"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
