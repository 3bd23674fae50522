#!/usr/bin/env bash
# xgrammar 0.2.9 and lm-format-enforcer 0.11.3 beside llguidance 1.9.1: a `pattern` is the whole
# text of a string, as if ^ and $ stood around it. In JSON Schema it is found anywhere. A model that
# is to write a file's name, by the pattern [.]py$, can write ".py" and nothing else, and a word
# with a capital, by ^[A-Z], has one letter. In xgrammar, names by `patternProperties` are cut the
# same way. No error or warning tells it.
# Seen on 2026-11-30: ^[A-Z]: llguidance A Ab, xgrammar A, lm-format-enforcer A; [.]py$: llguidance
# .py a.py, xgrammar .py, lm-format-enforcer .py; names ^x-: llguidance x- x-a, xgrammar x-
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps 'xgrammar==0.2.9' 'apache-tvm-ffi==0.1.15.post2' \
    'pydantic==2.14.4' 'pydantic-core==2.50.5' 'annotated-types==0.8.0' \
    'typing-inspection==0.4.5' 'typing-extensions==4.16.0' 'numpy==2.3.5' 'jsonschema==4.26.0' \
    'jsonschema-specifications==2025.9.1' 'referencing==0.37.0' 'rpds-py==2026.9.1' \
    'attrs==26.1.0' 'llguidance==1.9.1' 'lm-format-enforcer==0.11.3' 'interegular==0.3.3' \
    'packaging==26.4' 'pyyaml==6.0.4'
output=$("$folder/venv/bin/python" - <<'PY'
import importlib.util
import json
import sys
from types import ModuleType

import tvm_ffi  # noqa: F401
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from lmformatenforcer import JsonSchemaParser

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

tokenizer = LLTokenizer("byte")


def llguidance(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def xgrammar(schema, text):
    return _is_grammar_accept_string(Grammar.from_json_schema(json.dumps(schema)), text)


def enforcer(schema, text):
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


def words(names, engines, schema, value=lambda word: word):
    texts = {name: json.dumps(value(name)) for name in names}
    for text in texts.values():
        assert Draft202012Validator(schema).is_valid(json.loads(text))
    for engine, takes in engines.items():
        yield " ".join([engine, *(word for word, text in texts.items() if takes(schema, text))])


engines = {"llguidance": llguidance, "xgrammar": xgrammar, "lm-format-enforcer": enforcer}
for pattern, names in (("^[A-Z]", ("A", "Ab")), ("[.]py$", (".py", "a.py"))):
    schema = {"type": "string", "pattern": pattern}
    print(f"{pattern}:", ", ".join(words(names, engines, schema)), end="; ")
del engines["lm-format-enforcer"]
schema = {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}}
schema["additionalProperties"] = False
print("names ^x-:", ", ".join(words(("x-", "x-a"), engines, schema, lambda word: {word: 1})))
PY
)
echo "$output"
expected="^[A-Z]: llguidance A Ab, xgrammar A, lm-format-enforcer A"
expected+="; [.]py\$: llguidance .py a.py, xgrammar .py, lm-format-enforcer .py"
expected+="; names ^x-: llguidance x- x-a, xgrammar x-"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
