#!/usr/bin/env bash
# prometheus_client 0.26.0: the parser of the text format renames the samples of a counter whose
# name does not end in _total. The format has no such rule, and NVIDIA's DCGM exporter has
# counters such as DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION. Who looks for the name on the page finds
# nothing, and who writes the page anew gives the series another name. Gauges keep their names.
# Seen on 2026-11-29: page: energy_consumption, parsed: energy_consumption_total, gauge:
# memory_used
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'prometheus-client==0.26.0'
output=$("$folder/venv/bin/python" - <<'PY'
from prometheus_client.parser import text_string_to_metric_families


def parsed(kind, name):
    page = f'# TYPE {name} {kind}\n{name}{{gpu="0"}} 3\n'
    (family,) = text_string_to_metric_families(page)
    (sample,) = family.samples
    assert (sample.value, sample.labels) == (3, {"gpu": "0"})
    return sample.name


print("page: energy_consumption, parsed:", parsed("counter", "energy_consumption"), end=", ")
print("gauge:", parsed("gauge", "memory_used"))
PY
)
echo "$output"
expected="page: energy_consumption, parsed: energy_consumption_total, gauge: memory_used"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
