#!/usr/bin/env bash
# xgrammar 0.2.9 beside llguidance 1.9.1, outlines_core 0.2.14 and lm-format-enforcer 0.11.3: the
# point of a pattern takes a line break in xgrammar alone. An answer that "Answer: .*" limits to one
# line may go on for thousands of lines, up to the limit of tokens, and a program that reads its
# first line has a part. [^\n]* is right in all. \S takes only ASCII in lm-format-enforcer, so no
# name such as José can be written, and \d takes digits of all scripts in llguidance and
# outlines_core. One pattern changes its meaning with the backend that an engine chooses.
# The compiler of grammars is native code. Its Python package also imports torch and transformers,
# whose place here is taken by names without function, to save gigabytes.
# Seen on 2026-11-30: line break by .*: yes no no no; by [^\n]*: no no no no; accent by \S*: yes yes
# yes no; Arabic digit by \d: no yes yes no
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps 'xgrammar==0.2.9' \
    'apache-tvm-ffi==0.1.15.post2' 'pydantic==2.14.4' 'pydantic-core==2.50.5' \
    'annotated-types==0.8.0' 'typing-inspection==0.4.5' 'typing-extensions==4.16.0' \
    'numpy==2.3.5' 'llguidance==1.9.1' 'outlines_core==0.2.14' 'lm-format-enforcer==0.11.3' \
    'interegular==0.3.3' 'packaging==26.4' 'pyyaml==6.0.4'
output=$("$folder/venv/bin/python" - <<'PY'
import importlib.util
import sys
from types import ModuleType

import tvm_ffi  # noqa: F401
from llguidance import LLMatcher, LLTokenizer
from lmformatenforcer import RegexParser
from outlines_core import Guide, Index, Vocabulary

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


def xgrammar(pattern, text):
    return _is_grammar_accept_string(Grammar.from_regex(pattern), text)


def llguidance(pattern, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(pattern))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def outlines(pattern, text):
    letters = sorted(set(text) | {"a", "b", "0", "\n"})
    end = len(letters)
    places = {letter: [place] for place, letter in enumerate(letters)}
    guide = Guide(Index(pattern, Vocabulary(end, places)))
    for letter in text:
        place = letters.index(letter)
        if place not in guide.get_tokens():
            return False
        guide.advance(place)
    return end in guide.get_tokens()


def enforcer(pattern, text):
    parser = RegexParser(pattern)
    for letter in text:
        if letter not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(letter)
    return parser.can_end()


engines = xgrammar, llguidance, outlines, enforcer
cases = {
    "line break by .*": ("a.*", "a\nb"),
    "by [^\\n]*": ("a[^\\n]*", "a\nb"),
    "accent by \\S*": (r"\S*", "Jos\u00e9"),
    "Arabic digit by \\d": (r"\d", "\u0663"),
}
words = [
    f"{title}: {' '.join('yes' if takes(*case) else 'no' for takes in engines)}"
    for title, case in cases.items()
]
print("; ".join(words))
PY
)
echo "$output"
expected="line break by .*: yes no no no; by [^\\n]*: no no no no; accent by \\S*: yes yes yes "
expected+="no; Arabic digit by \\d: no yes yes no"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
