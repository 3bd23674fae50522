#!/usr/bin/env bash
# minijinja 3.1.0 beside Jinja2 3.1.6: `is sequence` is true for strings and mappings in Jinja2 and
# false in minijinja. A chat template that tells plain text from a list of parts by this test takes
# another branch in servers that render with minijinja.
# Seen on 2026-11-28: Jinja2 True True True, minijinja False False True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'minijinja==3.1.0' 'jinja2==3.1.6'
output=$("$folder/venv/bin/python" - <<'PY'
import jinja2
import minijinja

template = "{{ text is sequence }} {{ mapping is sequence }} {{ parts is sequence }}"
values = {"text": "hi", "mapping": {"type": "text"}, "parts": [{"type": "text"}]}
print("Jinja2", jinja2.Template(template).render(**values), end=", ")
print("minijinja", minijinja.Environment().render_str(template, **values))
PY
)
echo "$output"
[ "$output" = "Jinja2 True True True, minijinja False False True" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
