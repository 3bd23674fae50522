#!/usr/bin/env bash
# opentelemetry-exporter-prometheus 0.66b2: one exponential histogram makes every scrape end in an
# AttributeError, so the metrics of the whole process are gone. The SDK offers that aggregation by
# a view, and exporters of OTLP take it.
# Seen on 2026-11-29: explicit buckets: page, exponential: AttributeError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'opentelemetry-exporter-prometheus==0.66b2' \
    'opentelemetry-sdk==1.45.2' 'prometheus-client==0.26.0'
output=$("$folder/venv/bin/python" - <<'PY'
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics import view as views
from prometheus_client import REGISTRY, generate_latest


def outcome(aggregation):
    reader = PrometheusMetricReader()
    view = views.View(instrument_name="latency", aggregation=aggregation)
    provider = MeterProvider(metric_readers=[reader], views=[view], shutdown_on_exit=False)
    meter = provider.get_meter("server")
    meter.create_counter("requests").add(1)
    meter.create_histogram("latency").record(3)
    try:
        page = generate_latest(REGISTRY).decode()
    except AttributeError:
        return "AttributeError"
    finally:
        provider.shutdown()
    return "page" if "requests_total{" in page and "latency_bucket{" in page else "other page"


print("explicit buckets:", outcome(views.ExplicitBucketHistogramAggregation()), end=", ")
print("exponential:", outcome(views.ExponentialBucketHistogramAggregation()))
PY
)
echo "$output"
expected="explicit buckets: page, exponential: AttributeError"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
