#!/usr/bin/env bash
# safetensors 0.8.0 beside 0.7.0: an array of numpy that is not in C order is written from its
# memory as it lies, under the shape that the array has. A transposed weight comes back with its
# numbers in other places, without an error. The documentation asks for contiguous arrays, and
# nothing checks that. 0.7.0 wrote the numbers in the order of the shape.
# Seen on 2026-11-29: 0.7.0: [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
# 0.8.0: [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
transposed() {
    python3 -m venv "$folder/$1"
    "$folder/$1/bin/pip" install --quiet "safetensors==$1" 'numpy==2.4.6'
    "$folder/$1/bin/python" - "$1" <<'PY'
import sys

import numpy
from safetensors.numpy import load, save

weight = numpy.arange(6, dtype=numpy.float32).reshape(2, 3).T
read = load(save({"weight": weight}))["weight"]
assert read.shape == weight.shape and weight.tolist() == [[0, 3], [1, 4], [2, 5]]
print(f"{sys.argv[1]}: {read.tolist()}")
PY
}
output="$(transposed 0.7.0), $(transposed 0.8.0)"
echo "$output"
expected="0.7.0: [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], 0.8.0: [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
