#!/usr/bin/env bash
# prometheus_client 0.26.0: the answer to a scrape is in the OpenMetrics format as soon as the
# Accept header names it, whatever the quality values say. A server of Prometheus that is set to
# prefer the text format names both with values (RFC 9110, 12.4.2), and gets the other one. Even
# q=0, which means "not acceptable", is taken for a wish.
# Seen on 2026-11-29: text 0.9, OpenMetrics 0.1: OpenMetrics; text, OpenMetrics 0: OpenMetrics;
# text: text
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'prometheus-client==0.26.0'
output=$("$folder/venv/bin/python" - <<'PY'
from prometheus_client import CollectorRegistry, Counter, make_wsgi_app

registry = CollectorRegistry()
Counter("requests", "Requests.", registry=registry)
page = make_wsgi_app(registry)


def kind(accept):
    heads = []
    environment = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "HTTP_ACCEPT": accept}
    page(environment, lambda status, headers, *rest: heads.append(dict(headers)))
    names = {"text/plain": "text", "application/openmetrics-text": "OpenMetrics"}
    return names[heads[0]["Content-Type"].partition(";")[0]]


text, other = "text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0"
print("text 0.9, OpenMetrics 0.1:", kind(f"{other};q=0.1,{text};q=0.9"), end="; ")
print("text, OpenMetrics 0:", kind(f"{text},{other};q=0"), end="; ")
print("text:", kind(text))
PY
)
echo "$output"
expected="text 0.9, OpenMetrics 0.1: OpenMetrics; text, OpenMetrics 0: OpenMetrics; text: text"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
