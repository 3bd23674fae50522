#!/usr/bin/env bash
# xgrammar 0.2.9: a bound on a number limits its texts to six decimals and forbids exponents, which
# a number without bounds may have. A range below 1e-6 compiles without an error into a grammar that
# takes none of its numbers, so a model cannot write a valid value there.
# Seen on 2026-11-29: no bound: yes yes, minimum 0: no no, 1e-7 to 5e-7: no no
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps 'xgrammar==0.2.9' 'apache-tvm-ffi==0.1.15.post2' \
    'pydantic==2.14.4' 'pydantic-core==2.50.5' 'annotated-types==0.8.0' \
    'typing-inspection==0.4.5' 'typing-extensions==4.16.0' 'numpy==2.3.5'
output=$("$folder/venv/bin/python" - <<'PY'
import importlib.util
import json
import sys
from types import ModuleType

import tvm_ffi  # noqa: F401

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


def takes(bounds, *texts):
    grammar = Grammar.from_json_schema(json.dumps({"type": "number"} | bounds))
    taken = (_is_grammar_accept_string(grammar, text) for text in texts)
    return " ".join("yes" if text_taken else "no" for text_taken in taken)


print("no bound:", takes({}, "0.1234567", "2e-3"), end=", ")
print("minimum 0:", takes({"minimum": 0}, "0.1234567", "2e-3"), end=", ")
print("1e-7 to 5e-7:", takes({"minimum": 1e-7, "maximum": 5e-7}, "0.0000002", "2e-7"))
PY
)
echo "$output"
[ "$output" = "no bound: yes yes, minimum 0: no no, 1e-7 to 5e-7: no no" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
