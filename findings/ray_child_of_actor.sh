#!/usr/bin/env bash
# ray 2.60.0: a program that an actor starts inherits more than the user's environment: niceness 15,
# an OOM score adjustment of 1000 (the kernel ends it before all others) and OMP_NUM_THREADS=1. A
# server that is started this way is slow and dies first, whatever its own session or process group.
# Seen on 2026-11-28: driver 0 0 None, child of an actor 15 1000 1
set -euo pipefail
folder=$(mktemp -d /tmp/rayXXXX)
trap '"$folder/venv/bin/ray" stop --force >/dev/null 2>&1 || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'ray==2.60.0'
unset OMP_NUM_THREADS
output=$(RAY_USAGE_STATS_ENABLED=0 "$folder/venv/bin/python" - "$folder/t" 2>"$folder/log" <<'PY'
import subprocess
import sys

import ray

SHOW = (
    "import os; print(os.nice(0), open('/proc/self/oom_score_adj').read().strip(),"
    " os.environ.get('OMP_NUM_THREADS'))"
)


def child():
    command = [sys.executable, "-c", SHOW]
    return subprocess.check_output(command, text=True, start_new_session=True).strip()


@ray.remote
class Starter:
    def child(self):
        return child()


print("driver", child(), end=", ")
ray.init(num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[1], log_to_driver=False)
print("child of an actor", ray.get(Starter.remote().child.remote()))
ray.shutdown()
PY
) || { cat "$folder/log" >&2; exit 1; }
echo "$output"
[[ $output = *"child of an actor 15 1000 1" ]] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
