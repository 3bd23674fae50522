#!/usr/bin/env bash
# xgrammar 0.2.9: beside `anyOf` all other keywords of a schema are left out, without an error or
# warning: properties, required, types of values. A schema that says "these members, and one of
# two further ones" lets a model write objects that it forbids. The members stand in no branch, so
# the valid object is refused as well, as branches take no further members.
# Seen on 2026-11-29: valid no, without member yes, value of wrong type yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps 'xgrammar==0.2.9' 'apache-tvm-ffi==0.1.15.post2' \
    'pydantic==2.14.4' 'pydantic-core==2.50.5' 'annotated-types==0.8.0' \
    'typing-inspection==0.4.5' 'typing-extensions==4.16.0' 'numpy==2.3.5' 'jsonschema==4.26.0' \
    'jsonschema-specifications==2025.9.1' 'referencing==0.37.0' 'rpds-py==2026.9.1' \
    'attrs==26.1.0'
output=$("$folder/venv/bin/python" - <<'PY'
import importlib.util
import json
import sys
from types import ModuleType

import tvm_ffi  # noqa: F401
from jsonschema import Draft202012Validator

# The compiler of grammars is native code. Its Python package also imports torch and transformers,
# whose place here is taken by names without function, to save gigabytes.
paths = importlib.util.find_spec("xgrammar").submodule_search_locations
for name, parts in (
    ("torch", {"Tensor": object, "int32": None, "tensor": lambda *values, **options: None}),
    ("transformers", {"PreTrainedTokenizerBase": type, "PreTrainedTokenizerFast": type}),
    ("xgrammar", {"__path__": paths}),
):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(parts)

import xgrammar.load_binding  # noqa: E402, F401
from xgrammar.grammar import Grammar  # noqa: E402
from xgrammar.testing import _is_grammar_accept_string  # noqa: E402


def takes(schema, text, valid=True):
    assert Draft202012Validator(schema).is_valid(json.loads(text)) == valid
    grammar = Grammar.from_json_schema(json.dumps(schema))
    return "yes" if _is_grammar_accept_string(grammar, text) else "no"


members = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
branches = [{"properties": {"k": {"const": kind}}, "required": ["k"]} for kind in ("x", "y")]
schema = members | {"anyOf": branches}
print(f"valid {takes(schema, json.dumps({'a': 1, 'k': 'x'}))}", end=", ")
print(f"without member {takes(schema, json.dumps({'k': 'x'}), valid=False)}", end=", ")
schema = members | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
print("value of wrong type", takes(schema, json.dumps({"a": "text"}), valid=False))
PY
)
echo "$output"
expected="valid no, without member yes, value of wrong type yes"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
