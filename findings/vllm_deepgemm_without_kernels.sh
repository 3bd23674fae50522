#!/usr/bin/env bash
# vllm 0.27.1: its platform offers DeepGEMM to GPUs of compute capability 12.x, and the wheel has no
# DeepGEMM kernel for them, so every model with FP8 blocks fails while it loads there.
# Seen on 2026-11-28: offered to families 90 100 120, GEMM kernels of sm100 sm90.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip download --quiet --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 \
  --python-version 3.11 --implementation cp --abi abi3 --abi cp38 --dest "$folder" 'vllm==0.27.1'
output=$(python3 - "$folder" <<'PYTHON'
import re
import sys
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    platform = archive.read("vllm/platforms/cuda.py").decode()
    kernels = "vllm/third_party/deep_gemm/include/deep_gemm/impls/"
    names = [name.removeprefix(kernels) for name in archive.namelist() if name.startswith(kernels)]
rule = platform.split("def support_deep_gemm")[1].split("    def ")[0]
offered = sorted(set(re.findall(r"is_device_capability(?:_family)?\((\d+)\)", rule)), key=int)
compiled = sorted({name.split("_")[0] for name in names if re.match(r"sm\d+_.*gemm", name)})
print("offered to families", *offered, "GEMM kernels of", *compiled)
PYTHON
)
[[ $output == "offered to families 90 100 120 GEMM kernels of sm100 sm90" ]] || {
  echo "The behaviour changed: $output" >&2
  exit 1
}
