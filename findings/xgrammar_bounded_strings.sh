#!/usr/bin/env bash
# xgrammar 0.2.9: a string with `minLength`, `maxLength` or `pattern` cannot hold a character that
# JSON writes as an escape. A line break, a tab, a quote and a backslash are out of reach, so a
# model that fills such a parameter with code writes it in one line without quotes. Without a
# bound all are taken. No error or warning tells it.
# Seen on 2026-11-29: no bound: yes yes yes, minLength 1: no no no, maxLength 99: no no no,
# pattern: no no no
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


texts = [json.dumps(text) for text in ("a\nb", 'a"b', "a\\b")]
schemas = {
    "no bound": {},
    "minLength 1": {"minLength": 1},
    "maxLength 99": {"maxLength": 99},
    "pattern": {"pattern": r"^[\s\S]+$"},
}
lines = (
    f"{name}: " + " ".join(takes({"type": "string"} | schema, text) for text in texts)
    for name, schema in schemas.items()
)
print(", ".join(lines))
PY
)
echo "$output"
expected="no bound: yes yes yes, minLength 1: no no no, maxLength 99: no no no, pattern: no no no"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
