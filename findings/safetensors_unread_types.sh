#!/usr/bin/env bash
# safetensors 0.8.0 with ml_dtypes 0.6.0: the module for numpy writes arrays of bfloat16 and of the
# 8 bit floats, and cannot read its own file: `load` ends in a KeyError, for the whole file, also
# where only one of its tensors has such a type. The header and the bytes are right.
# Seen on 2026-11-29: bfloat16: KeyError 'BF16', float8_e4m3fn: KeyError 'F8_E4M3', float16: read
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'safetensors==0.8.0' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
output=$("$folder/venv/bin/python" - <<'PY'
import ml_dtypes
import numpy
from safetensors.numpy import load, save


def outcome(type_):
    norm = numpy.ones(2, dtype=numpy.float32)
    weight = numpy.arange(4).astype(type_)
    file = save({"norm": norm, "weight": weight})
    assert file.endswith(weight.tobytes()) or weight.tobytes() in file
    try:
        read = load(file)
    except KeyError as error:
        return f"KeyError {error}"
    assert (read["weight"] == weight).all()
    return "read"


print("bfloat16:", outcome(ml_dtypes.bfloat16), end=", ")
print("float8_e4m3fn:", outcome(ml_dtypes.float8_e4m3fn), end=", ")
print("float16:", outcome(numpy.float16))
PY
)
echo "$output"
expected="bfloat16: KeyError 'BF16', float8_e4m3fn: KeyError 'F8_E4M3', float16: read"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
