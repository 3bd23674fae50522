#!/usr/bin/env bash
# xgrammar 0.2.9: an array without `items` may hold any values, until one more keyword stands
# beside it. With `maxItems` 3 or with `contains` the only text is the empty array, with
# `minItems` 1 the schema is an error. A schema that limits a list makes the model return an empty
# one. With `items` {} the limit is right.
# Seen on 2026-11-29: array: yes, maxItems 3: no, contains: no, minItems 1: RuntimeError, items
# and maxItems 3: yes
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



def outcome(**keywords):
    try:
        return takes({"type": "array"} | keywords, "[1, 2]")
    except RuntimeError as error:
        return type(error).__name__


print(f"array: {outcome()}, maxItems 3: {outcome(maxItems=3)}", end=", ")
print(f"contains: {outcome(contains={'const': 1})}, minItems 1: {outcome(minItems=1)}", end=", ")
print(f"items and maxItems 3: {outcome(items={}, maxItems=3)}")
PY
)
echo "$output"
expected="array: yes, maxItems 3: no, contains: no, minItems 1: RuntimeError, items and maxItems"
expected+=" 3: yes"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
