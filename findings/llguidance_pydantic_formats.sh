#!/usr/bin/env bash
# llguidance 1.9.1 with pydantic 2.14.4: the schema of a Path, a SecretStr, a UUID4, bytes or a
# network is an error to the grammar, since pydantic names formats of its own, and so is the schema
# of a set, for `uniqueItems`. To JSON Schema (Validation, 7.2.3) an unknown format is a note. A
# request with such a schema fails where llguidance makes the grammar.
# Seen on 2026-11-30: str: taken, UUID: taken, Path: Unknown format: path, UUID4: Unknown format:
# uuid4, SecretStr: Unknown format: password, bytes: Unknown format: binary, IPv4Network: Unknown
# format: ipv4network, set: Unimplemented keys: ["uniqueItems"]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'llguidance==1.9.1' 'pydantic==2.14.4' \
    'jsonschema==4.26.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
from ipaddress import IPv4Network
from pathlib import Path
from uuid import UUID

from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from pydantic import UUID4, SecretStr, TypeAdapter

tokenizer = LLTokenizer("byte")


def verdict(kind):
    schema = TypeAdapter(kind).json_schema()
    Draft202012Validator.check_schema(schema)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return matcher.get_error().splitlines()[0].strip() if matcher.is_error() else "taken"


kinds = {
    "str": str,
    "UUID": UUID,
    "Path": Path,
    "UUID4": UUID4,
    "SecretStr": SecretStr,
    "bytes": bytes,
    "IPv4Network": IPv4Network,
    "set": set[int],
}
print("; ".join(f"{name}: {verdict(kind)}" for name, kind in kinds.items()))
PY
)
echo "$output"
expected="str: taken; UUID: taken; Path: Unknown format: path; UUID4: Unknown format: uuid4"
expected+="; SecretStr: Unknown format: password; bytes: Unknown format: binary"
expected+="; IPv4Network: Unknown format: ipv4network"
expected+='; set: Unimplemented keys: ["uniqueItems"]'
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
