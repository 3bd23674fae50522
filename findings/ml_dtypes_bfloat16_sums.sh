#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: sums and means of bfloat16 are added up in bfloat16, one number
# after the other. Above 256 a one is lost to rounding, so the sum of a thousand ones is 256 and
# their mean a quarter. The scale or the norm of a layer that is computed like this is wrong without
# an error. float16, with as few bits, is right, and so is bfloat16 with a dtype for the sum.
# Seen on 2026-11-30: bfloat16: sum 256, mean 0.256, of 70000: 256; float16: sum 1000, mean 1; with
# dtype: sum 1000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'ml_dtypes==0.6.0' 'numpy==2.4.6'
output=$("$folder/venv/bin/python" - <<'PY'
import ml_dtypes
import numpy


def results(kind):
    ones = numpy.ones(1000, dtype=kind)
    return f"sum {float(ones.sum()):g}, mean {float(ones.mean()):.3g}"


many = numpy.ones(70000, dtype=ml_dtypes.bfloat16)
print(f"bfloat16: {results(ml_dtypes.bfloat16)}, of 70000: {float(many.sum()):g}", end="; ")
print(f"float16: {results(numpy.float16)}", end="; ")
print(f"with dtype: sum {many[:1000].sum(dtype=numpy.float32):g}")
PY
)
echo "$output"
expected="bfloat16: sum 256, mean 0.256, of 70000: 256; float16: sum 1000, mean 1"
[ "$output" = "$expected; with dtype: sum 1000" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
