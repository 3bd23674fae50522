"""All commands together: the help, and what an import costs."""

from __future__ import annotations

import re
import subprocess
import sys

from gateway.cli.registry import SECTIONS
from tests.support.paths import ROOT

# Each takes longer to import than all of the program's own words.
HEAVY = {"rich", "yaml", "httpx", "fastapi", "uvicorn", "docker", "huggingface_hub", "asyncio"}


def test_the_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "gateway.__main__", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Talk with MODEL" in done.stdout
    lines = done.stdout.splitlines()
    for title, commands in SECTIONS.items():
        assert f"{title}:" in lines
        assert set(commands) <= {line.split()[0] for line in lines if line.startswith("  ")}
    assert [line for line in lines[1:] if line.endswith("...")] == []
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "gateway.cli.registry" in imported
    assert imported & HEAVY == set()


def test_one_command_imports_no_other() -> None:
    program = (
        "import sys\n"
        "from gateway.cli.registry import add_commands\n"
        "from gateway.cli.main import app\n"
        "add_commands(app, 'plan')\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {name for name in done.stdout.split() if name.startswith("gateway.cli.commands.")}
    assert imported == {"gateway.cli.commands.plan"}
