#!/usr/bin/env bash
# huggingface_hub 2.4.0: a star in `allow_patterns` and `ignore_patterns` also stands for slashes.
# "*.safetensors" takes the files of all folders, so a repository with the weights of other programs
# in original/ or onnx/ is loaded several times over: 30 GB for a model of 10 GB here.
# "**/*.safetensors", which elsewhere means all depths, leaves out the top folder, where the weights
# are. Only a list of names takes the files of the top folder alone.
# Seen on 2026-11-30: *.safetensors 30 GB, **/*.safetensors 20 GB, ./*.safetensors 0 GB,
# model.safetensors 10 GB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'huggingface_hub==2.4.0'
output=$("$folder/venv/bin/python" - <<'PY'
from huggingface_hub.utils import filter_repo_objects

sizes = {"model.safetensors": 10, "original/model.safetensors": 10, "onnx/model.safetensors": 10}


def gigabytes(*patterns):
    return sum(sizes[path] for path in filter_repo_objects(sizes, allow_patterns=list(patterns)))


patterns = "*.safetensors", "**/*.safetensors", "./*.safetensors", "model.safetensors"
print(", ".join(f"{pattern} {gigabytes(pattern)} GB" for pattern in patterns))
PY
)
echo "$output"
expected="*.safetensors 30 GB, **/*.safetensors 20 GB, ./*.safetensors 0 GB, model.safetensors"
expected+=" 10 GB"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
