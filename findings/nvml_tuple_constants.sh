#!/usr/bin/env bash
# nvidia-ml-py 13.615.71: six enumeration constants of pynvml are one-element tuples, by a comma at
# the end of their lines. NVML_P2P_CAPS_INDEX_READ is one; comparisons with integers that NVML
# returns are always false, and an index of a C array cannot be made of it.
# Seen on 2026-11-28: NVML_P2P_CAPS_INDEX_READ = (0,), its neighbour NVML_P2P_CAPS_INDEX_WRITE = 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'nvidia-ml-py==13.615.71'
output=$("$folder/venv/bin/python" - <<'PY'
import pynvml

tuples = [name for name, value in vars(pynvml).items() if isinstance(value, tuple)]
tuples = [name for name in tuples if name.startswith("NVML_")]
print(len(tuples), pynvml.NVML_P2P_CAPS_INDEX_READ, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
PY
)
echo "$output"
[ "$output" = "6 (0,) 1" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
