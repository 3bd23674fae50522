"""Instructions of commands in user mode, in this tree and in another one.

    python -m benchmarks.commands [--before TREE]

TREE: another checkout, made by `git worktree add TREE COMMIT`. Counted by valgrind's cachegrind, so
other work of the machine changes nothing. Each command runs once before, so that bytecode and the
cache of profiles are kept as for a user's second command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "tests" / "models" / "llama-3.1-8b.json"
PLAN = "fitserve plan of Llama-3.1-8B on 2x3090, all engine versions"
# Plans of Llama-3.1-70B, in addition to those of the 8B.
LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def commands(folder: Path, large: Path) -> dict[str, list[str]]:
    """The arguments of Python."""
    plan = ["-m", "gateway.__main__", "plan", str(folder), "--hardware", "2x3090"]
    return {
        PLAN: plan,
        "the same as JSON": [*plan, "--json"],
        "the same of Llama-3.1-70B on 8xh100": [*plan[:3], str(large), "--hardware", "8xh100"],
        "fitserve ps --help": ["-m", "gateway.__main__", "ps", "--help"],
        "import gateway.cli.main": ["-c", "import gateway.cli.main"],
    }


def instructions(arguments: list[str], tree: Path, data: Path) -> int:
    """The instructions of the second run."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": str(tree),
        "PYTHONHASHSEED": "0",
        "FITSERVE_DATA_DIR": str(data),
    }
    command = [sys.executable, *arguments]
    counter = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    for prefix in ([], counter):
        done = subprocess.run(
            [*prefix, *command],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if found is None:
        raise SystemExit(f"valgrind counted nothing: {done.stderr[-500:]}")
    return int(found[1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="another checkout")
    before = parser.parse_args().before
    with tempfile.TemporaryDirectory() as name:
        folder, large = Path(name) / "model", Path(name) / "large"
        config = json.loads(MODEL.read_text())
        for path, changed in (folder, {}), (large, LARGE):
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config | changed))
        for what, arguments in commands(folder, large).items():
            now = instructions(arguments, ROOT, Path(name) / "data")
            line = f"{what}: {now / 1e6:,.0f} million instructions"
            if before is not None:
                then = instructions(arguments, before.resolve(), Path(name) / "data-before")
                line += f", before {then / 1e6:,.0f}, now / before {now / then:.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
