#!/usr/bin/env bash
# opentelemetry-exporter-prometheus 0.66b2: names that differ only in a character which Prometheus
# lacks become one name, and their values are neither added nor told apart. The page then has two
# samples of one series, of which Prometheus keeps one. This holds for names of metrics (x.y, x_y)
# and of attributes. Two such attributes at one value keep one value; the specification joins both
# with a semicolon.
# Seen on 2026-11-29: metrics: 2 samples of 1 series, attributes: 2 samples of 1 series, both:
# model="b"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'opentelemetry-exporter-prometheus==0.66b2' \
    'opentelemetry-sdk==1.45.2' 'prometheus-client==0.26.0'
output=$("$folder/venv/bin/python" - <<'PY'
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest

meter = MeterProvider(metric_readers=[PrometheusMetricReader()]).get_meter("server")
meter.create_counter("queue.length").add(1)
meter.create_counter("queue_length").add(2)
tokens = meter.create_counter("tokens")
tokens.add(5, {"gen_ai.model": "a"})
tokens.add(7, {"gen_ai_model": "a"})
meter.create_counter("answers").add(1, {"gen_ai.model": "a", "gen_ai_model": "b"})
lines = generate_latest(REGISTRY).decode().splitlines()


def samples(name):
    series = [line.rpartition(" ")[0] for line in lines if line.startswith(f"{name}_total{{")]
    return f"{len(series)} samples of {len(set(series))} series"


(both,) = (line for line in lines if line.startswith("answers_total{"))
print(f"metrics: {samples('queue_length')}, attributes: {samples('tokens')}", end=", ")
print("both: model=" + both.partition("gen_ai_model=")[2].partition(",")[0])
PY
)
echo "$output"
expected='metrics: 2 samples of 1 series, attributes: 2 samples of 1 series, both: model="b"'
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
