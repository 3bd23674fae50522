#!/usr/bin/env bash
# nvidia-ml-py 13.615.71 with nvidia-ml-py3 7.352.0: two packages bring the same file, pynvml.py,
# and pip writes the one over the other without a word. An old library that requires nvidia-ml-py3
# turns the bindings of 2025 into those of 2017 for the whole environment: MIG, the memory that the
# driver reserves and the links between GPUs are gone, and an engine that asks for them fails in an
# AttributeError. pip check finds nothing. The usual remedy, to remove the old package, removes the
# module of both.
# Seen on 2026-11-30: new one: True True, with the old one: False False, No broken requirements
# found., old one removed: gone gone, No broken requirements found.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python="$folder/venv/bin/python"
function has {
    "$python" -c "import pynvml; print(hasattr(pynvml, '$1'))" 2>/dev/null || echo gone
}
function state { echo "$(has nvmlDeviceGetMigMode) $(has nvmlMemory_v2)"; }
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'nvidia-ml-py==13.615.71'
output="new one: $(state), "
"$folder/venv/bin/pip" install --quiet 'nvidia-ml-py3==7.352.0'
output+="with the old one: $(state), $("$folder/venv/bin/pip" check), "
"$folder/venv/bin/pip" uninstall --quiet --yes nvidia-ml-py3
output+="old one removed: $(state), $("$folder/venv/bin/pip" check)"
echo "$output"
expected="new one: True True, with the old one: False False, No broken requirements found., "
expected+="old one removed: gone gone, No broken requirements found."
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
