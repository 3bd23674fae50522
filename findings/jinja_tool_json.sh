#!/usr/bin/env bash
# Jinja2 3.1.6 beside minijinja 3.1.0 and transformers 5.24.0: `tools | tojson` in a chat template
# is another text in a plain environment than in transformers, which vLLM and SGLang use and models
# were trained with. Jinja2 sorts the members, so `function` stands before `type` and the
# description before the name, and it escapes <, >, &, quotes and all letters beyond ASCII.
# minijinja keeps order and letters, and escapes the signs. A tool with a description of 30 Chinese
# characters gets 180 characters for it, six times as many. A gateway that renders prompts itself to
# count tokens or to find a prefix in a cache gets other tokens from the first tool on.
# Seen on 2026-11-30: transformers type first, 102 characters; Jinja2 type last, 262 characters;
# minijinja type first, 112 characters
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'Jinja2==3.1.6' 'minijinja==3.1.0' 'transformers==5.24.0'
export TRANSFORMERS_VERBOSITY=error
output=$("$folder/venv/bin/python" - <<'PY'
import json

import minijinja
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

template = "{{ tools | tojson }}"
function = {"name": "f", "description": "\u6e29" * 30 + " <b>"}
tools = [{"type": "function", "function": function}]
((trained,), _) = render_jinja_template([[]], tools=tools, chat_template=template)
environments = {
    "transformers": trained,
    "Jinja2": ImmutableSandboxedEnvironment().from_string(template).render(tools=tools),
    "minijinja": minijinja.Environment().render_str(template, tools=tools),
}
words = []
for name, text in environments.items():
    assert json.loads(text) == tools
    order = "type first" if text.index('"type"') < text.index('"function"') else "type last"
    words.append(f"{name} {order}, {len(text)} characters")
print("; ".join(words))
PY
)
echo "$output"
expected="transformers type first, 102 characters; Jinja2 type last, 262 characters; minijinja"
expected+=" type first, 112 characters"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
