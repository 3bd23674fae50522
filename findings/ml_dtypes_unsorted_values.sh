#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: one NaN in an array of bfloat16 leaves the other numbers
# unsorted. numpy puts NaN behind all numbers, and documents it, for its own types. Ranks of logits
# or of scores, where a mask or an overflow makes a NaN, name the wrong tokens without an error.
# Seen on 2026-11-30: sorted: bfloat16 3 nan 1 2, float16 1 2 3 nan; ranks: bfloat16 0 1 2 3,
# float16 2 3 0 1; without NaN: bfloat16 1 2 3, float16 1 2 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'ml_dtypes==0.6.0' 'numpy==2.4.6'
output=$("$folder/venv/bin/python" -W ignore - <<'PY'
import ml_dtypes
import numpy

KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": numpy.float16}


def texts(function, numbers):
    for name, kind in KINDS.items():
        values = function(numpy.array(numbers, dtype=kind))
        yield " ".join([name, *(f"{float(value):g}" for value in values)])


numbers = [3, float("nan"), 1, 2]
print("sorted:", ", ".join(texts(numpy.sort, numbers)), end="; ")
print("ranks:", ", ".join(texts(numpy.argsort, numbers)), end="; ")
print("without NaN:", ", ".join(texts(numpy.sort, [3, 1, 2])))
PY
)
echo "$output"
expected="sorted: bfloat16 3 nan 1 2, float16 1 2 3 nan; ranks: bfloat16 0 1 2 3, float16 2 3 0 1"
[ "$output" = "$expected; without NaN: bfloat16 1 2 3, float16 1 2 3" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
