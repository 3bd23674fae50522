#!/usr/bin/env bash
# docker 7.2.0: a negated class such as [^a] in .dockerignore has the opposite effect. Docker
# matches with Go's filepath.Match, where ^ negates. The SDK for Python matches with fnmatch, where
# ! negates and ^ is a member of the class, so the context of a build lacks the file that was to
# stay.
# Seen on 2026-11-29: [^a].txt leaves out a.txt, keeps b.txt c.txt
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'docker==7.2.0'
mkdir "$folder/context"
touch "$folder/context/a.txt" "$folder/context/b.txt" "$folder/context/c.txt"
output=$("$folder/venv/bin/python" - "$folder/context" <<'PY'
import os
import sys

from docker.utils import exclude_paths

names = set(os.listdir(sys.argv[1]))
kept = exclude_paths(sys.argv[1], ["[^a].txt"]) & names
print("[^a].txt leaves out", *sorted(names - kept), end=", ")
print("keeps", *sorted(kept))
PY
)
echo "$output"
[ "$output" = "[^a].txt leaves out a.txt, keeps b.txt c.txt" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
