#!/usr/bin/env bash
# Jinja2 3.1.6 beside minijinja 3.1.0: in a chat template, `parameter.items` is the method of the
# dictionary, not the member `items` of a tool's schema. The types of an array's elements are lost,
# and a test whether the member is there is true for each parameter. Arguments of the names keys,
# values, get, copy, pop and update are methods as well. minijinja takes the member, so the prompt
# of one template differs between the two. `parameter["items"]` is right in both.
# Seen on 2026-11-30: array of: Jinja2 nothing, minijinja string; copy: Jinja2 method, minijinja 3;
# with brackets: Jinja2 string 3, minijinja string 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'Jinja2==3.1.6' 'minijinja==3.1.0'
output=$("$folder/venv/bin/python" - <<'PY'
import minijinja
from jinja2.sandbox import ImmutableSandboxedEnvironment

values = {
    "parameter": {"type": "array", "items": {"type": "string"}},
    "arguments": {"copy": 3},
}
environments = {
    "Jinja2": lambda text: ImmutableSandboxedEnvironment().from_string(text).render(**values),
    "minijinja": lambda text: minijinja.Environment().render_str(text, **values),
}


def texts(*templates):
    for name, render in environments.items():
        parts = (render(template) or "nothing" for template in templates)
        yield " ".join([name, *("method" if "method" in part else part for part in parts)])


elements, copies = "{{ parameter.items.type }}", "{{ arguments.copy }}"
brackets = "{{ parameter['items']['type'] }}", "{{ arguments['copy'] }}"
print("array of:", ", ".join(texts(elements)), end="; ")
print("copy:", ", ".join(texts(copies)), end="; ")
print("with brackets:", ", ".join(texts(*brackets)))
PY
)
echo "$output"
expected="array of: Jinja2 nothing, minijinja string; copy: Jinja2 method, minijinja 3"
expected+="; with brackets: Jinja2 string 3, minijinja string 3"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
