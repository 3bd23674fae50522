#!/usr/bin/env bash
# safetensors 0.8.0: the entries of `__metadata__` are written in a random order. The same tensors
# with the same metadata give files with other bytes at each call, so digests of a checkpoint (a
# cache's key, the deduplication of a store, a signature) do not tell that nothing changed. With
# one entry the bytes are the same each time.
# Seen on 2026-11-29: 32 files with 8 entries: more than one digest, with 1 entry: one digest
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'safetensors==0.8.0' 'numpy==2.4.6'
output=$("$folder/venv/bin/python" - <<'PY'
import hashlib

import numpy
from safetensors.numpy import save

tensors = {"a": numpy.zeros(2, dtype=numpy.float32)}


def digests(count):
    metadata = {f"key{number}": "value" for number in range(count)}
    files = (save(tensors, metadata=metadata) for _ in range(32))
    return "one digest" if len({hashlib.sha256(f).digest() for f in files}) == 1 else (
        "more than one digest"
    )


print(f"32 files with 8 entries: {digests(8)}, with 1 entry: {digests(1)}")
PY
)
echo "$output"
expected="32 files with 8 entries: more than one digest, with 1 entry: one digest"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
