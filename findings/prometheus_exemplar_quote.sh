#!/usr/bin/env bash
# prometheus_client 0.26.0: the OpenMetrics parser refuses an exemplar with an odd number of escaped
# quotes in the value of a label, which the library itself writes. One such exemplar makes the whole
# page unreadable to the parser. The same value in an ordinary label is read, and so are two quotes.
# Seen on 2026-11-29: label: read, exemplar with two quotes: read, with one: ValueError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'prometheus_client==0.26.0'
output=$("$folder/venv/bin/python" - <<'PY'
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families


def outcome(label, exemplar):
    registry = CollectorRegistry()
    counter = Counter("requests", "Requests.", ["model"], registry=registry)
    counter.labels(label).inc(exemplar={"prompt": exemplar})
    try:
        list(text_string_to_metric_families(generate_latest(registry).decode()))
    except ValueError as error:
        return type(error).__name__
    return "read"


print("label:", outcome('screen 5"', "plain"), end=", ")
print("exemplar with two quotes:", outcome("plain", 'say "hi"'), end=", ")
print("with one:", outcome("plain", 'screen 5"'))
PY
)
echo "$output"
[ "$output" = "label: read, exemplar with two quotes: read, with one: ValueError" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
