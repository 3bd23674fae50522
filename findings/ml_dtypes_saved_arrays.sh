#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: an array of bfloat16 in a .npy or .npz file comes back as raw
# bytes of two (|V2), without an error; the type's name is not in the file. numpy also says that
# the type is no floating one, so a check before a conversion or a quantization skips such
# weights. float16 is right in both.
# Seen on 2026-11-29: bfloat16: read as |V2, floating False; float8_e4m3fn: read as |V1, floating
# False; float16: read as float16, floating True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'ml_dtypes==0.6.0' 'numpy==2.4.6'
output=$("$folder/venv/bin/python" - <<'PY'
import io

import ml_dtypes
import numpy


def outcome(type_):
    file = io.BytesIO()
    numpy.save(file, numpy.arange(4).astype(type_))
    file.seek(0)
    read = numpy.load(file).dtype
    name = read.str if read.kind == "V" else read.name
    floating = numpy.issubdtype(type_, numpy.floating)
    return f"{numpy.dtype(type_).name}: read as {name}, floating {floating}"


print("; ".join(map(outcome, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, numpy.float16))))
PY
)
echo "$output"
expected="bfloat16: read as |V2, floating False; float8_e4m3fn: read as |V1, floating False;"
expected+=" float16: read as float16, floating True"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
