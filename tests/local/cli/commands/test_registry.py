"""All commands together: none pays for what it does not use."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.paths import ROOT

# Each takes longer to import than all of the program's own words.
HEAVY = {"rich", "yaml", "httpx", "fastapi", "uvicorn", "docker", "huggingface_hub", "asyncio"}


def test_the_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "gateway.__main__", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Talk with MODEL" in done.stdout
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "gateway.cli.commands.registry" in imported
    assert imported & HEAVY == set()
